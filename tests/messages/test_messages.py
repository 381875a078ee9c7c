"""What a refusal says, and that its remedy goes. The tables beside this file are those of calls and
of loading; command lines have a table and tests of their own (`test_commands.py`).
"""

from __future__ import annotations

import re

import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

from mmaccel.errors import MMAccelError
from tests.messages.calls import CASES as CALLS
from tests.messages.loading import CASES as LOADING
from tests.messages.refused import Refused

CASES = [pytest.param(case, id=re.sub(r" at 0x\w+", "", case.name)) for case in (*CALLS, *LOADING)]


@pytest.mark.parametrize("case", CASES)
def test_a_refusal_names_what_is_wrong_and_its_remedy_goes(case: Refused) -> None:
    call = case.target()
    passes: list[object] = []
    hook = register_module_forward_pre_hook(lambda module, _: passes.append(module))
    try:
        with pytest.raises(case.error) as caught:
            call(**case.wrong)
    finally:
        hook.remove()
    message = str(caught.value)
    assert [part for part in case.says if part not in message] == [], message
    assert not (case.before_passes and passes), "a pass was made"
    if isinstance(caught.value, MMAccelError):
        assert "\n" not in message and "expected" in message and "received" in message, message
    if case.instead is not None:
        case.target()(**case.wrong | case.instead)
