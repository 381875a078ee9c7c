"""What a refusal says. The tables beside this file are the one place where wordings are pinned.

A table is a module of this folder with a tuple `CASES`; each part of the library has one.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from mmaccel.errors import MMAccelError
from tests.messages.case import Refused

TABLES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if path.stem != "case" and not path.stem.startswith(("test_", "__"))
)
CASES = [
    pytest.param(case, id=re.sub(r" at 0x\w+", "", f"{table}: {case.name}"))
    for table in TABLES
    for case in import_module(f"tests.messages.{table}").CASES
]


@pytest.mark.parametrize("case", CASES)
def test_refusal_names_what_is_wrong_and_what_to_do(case: Refused) -> None:
    with pytest.raises(case.error) as caught:
        case.call()
    message = str(caught.value)
    missing = [part for part in case.says if part not in message]
    assert not missing, f"not in the message: {missing}\n{message}"
    if isinstance(caught.value, MMAccelError):
        assert "\n" not in message
        assert "expected" in message and "received" in message, message
