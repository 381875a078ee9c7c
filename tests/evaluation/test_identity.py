"""Rounding has to explain every row that parts, not the first few."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.evaluation.exactness import identity
from mmaccel.evaluation.exactness.identity import Divergence
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.results import Stats
from mmaccel.samplers.sampling_params import SamplingParams

ROWS, LENGTH = 7, 5


@pytest.mark.parametrize("worst", [None, 0, ROWS - 1])
def test_one_row_that_rounding_does_not_explain_breaks_the_promise(
    worst: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []

    def explain(pipe: Any, caption: str, *rest: Any) -> Any:
        looked.append(int(caption))
        assert rest[-1] is torch.bfloat16  # which rounds more than float32
        own = {"gap": 1.0, "rounding": 1.0, "limit": 2.0, "is_rounding": int(caption) != worst}
        return Divergence(**{name: own.get(name) for name in Divergence.__dataclass_fields__})

    monkeypatch.setattr(identity, "explain_divergence", explain)
    monkeypatch.setattr(identity, "kind_of", lambda model: "window")
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    names = [str(row) for row in range(ROWS)]
    stats = Stats(policy="p", exactness="bitwise", tokens=ROWS * LENGTH, passes=1, row_passes=ROWS)
    passes = torch.ones(ROWS, dtype=torch.int64)
    plain = ImageOutput([], tokens, passes, stats, names)
    other = ImageOutput([], tokens + torch.tensor([0, 0, 1, 0, 0]), passes, stats, names)
    pipe: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")))
    check = identity.compare_rows(
        "x",
        pipe,
        plain,
        other,
        list(range(ROWS)),
        SamplingParams(),
        promised=True,
        width=4,
        dtype="bfloat16",
    )
    assert looked == list(range(ROWS))
    assert check.holds == (worst is None) and check.is_broken == (worst is not None)
