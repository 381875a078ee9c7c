"""ComfyUI nodes with values that a workflow of hostile hands, or a link, may hold."""

from __future__ import annotations

import pytest

from mmaccel.comfy.nodes import NODES
from tests.fuzz import hostile

DEEP: list[object] = []
for _ in range(5000):
    DEEP = [DEEP]
VALUES = (*hostile.VALUES, *hostile.TEXTS, *hostile.NUMBERS, DEEP, {"a": DEEP}, 10**5000, b"x")


@pytest.mark.slow
@pytest.mark.parametrize("name", NODES)
def test_a_node_says_what_is_wrong_with_a_value(name: str) -> None:
    for widget in NODES[name].widgets:
        for value in VALUES:
            reason = NODES[name].refusal({widget.name: value})
            assert reason is None or 0 < len(reason) < 11_000
