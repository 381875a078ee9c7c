"""Rows of a canvas with fewer slots than others (`Prompt.slots`): each is the row alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mmaccel import (
    ContinuousBatching,
    EntropyBounded,
    KLStable,
    LosslessUnmask,
    MaskedParallel,
    Noise,
    SamplingParams,
    Stepwise,
)
from mmaccel.contracts import Arrivals, Prompt
from mmaccel.errors import ShapeError
from mmaccel.samplers.canvas.state import Canvas
from tests.fixtures.canvas import OTHERS, PROMPTS, masked
from tests.fixtures.toy_models import make_prompt

SLOTS = [7, 12, 3]
POLICIES = [
    Stepwise(),
    LosslessUnmask(3),
    EntropyBounded(1.5),
    KLStable(0.3, 0.5),
    MaskedParallel(4, order="random"),
]


def prompt(rows: list[int]) -> Prompt:
    tokens = [PROMPTS[k] for k in rows] + [OTHERS[k] for k in rows]
    return replace(make_prompt(tokens, 2), slots=torch.tensor([SLOTS[k] for k in rows]))


def decode(policy: Any, rows: list[int], batching: Any = None) -> list[tuple[list[int], int]]:
    """Tokens of each row, and its passes."""
    made = policy.sample(
        masked(),
        replace(prompt(rows), batching=batching),
        max(SLOTS[k] for k in rows),
        params=SamplingParams(guidance_scale=1.7),
        noise=Noise.from_seed([40 + k for k in rows], len(rows)),
    )
    lengths = made.lengths.tolist()
    assert lengths == [SLOTS[k] for k in rows]
    kept = [row[:n] for row, n in zip(made.tokens.tolist(), lengths, strict=True)]
    return list(zip(kept, made.passes.tolist(), strict=True))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_row_is_itself_alone(policy: Any) -> None:
    alone = [decode(policy, [k])[0] for k in range(3)]
    assert decode(policy, [0, 1, 2]) == alone
    assert decode(policy, [2, 1, 0], ContinuousBatching(2)) == alone[::-1]


def test_rows_join_with_slots_of_their_own() -> None:
    alone = [decode(Stepwise(), [k])[0] for k in (0, 1, 2)]
    waiting, ended = [0, 2], {}

    def arrive(_: int) -> Arrivals | None:
        if not waiting:
            return None
        k = waiting.pop(0)
        return Arrivals(prompt([k]), Noise.from_seed([40 + k], 1))

    begun = replace(
        prompt([1]),
        batching=ContinuousBatching(1, lambda row: ended.update({row.row: row}), arrive),
    )
    begun = replace(begun, tokens=torch.nn.functional.pad(begun.tokens, (0, 4)))
    Stepwise().sample(
        masked(), begun, 12, params=SamplingParams(guidance_scale=1.7),
        noise=Noise.from_seed([41], 1),
    )  # fmt: skip
    assert [ended[k].tokens.tolist() for k in range(3)] == [alone[k][0] for k in (1, 0, 2)]


def test_passes_leave_out_what_a_row_has_not() -> None:
    canvas = Canvas(prompt([0, 1, 2]), 12, 3, None)
    assert canvas.limit.tolist() == SLOTS and canvas.is_open.sum(1).tolist() == SLOTS
    assert canvas.drop_suffix and not Canvas(make_prompt(PROMPTS), 12, 3, None).drop_suffix


@pytest.mark.parametrize("slots", [[7, 12], [0, 1, 2]])
def test_slots_that_fit_no_rows_are_refused(slots: list[int]) -> None:
    with pytest.raises(ShapeError, match=r"prompt slots: expected \[3\] of 1 and more"):
        replace(make_prompt(PROMPTS), slots=torch.tensor(slots))
