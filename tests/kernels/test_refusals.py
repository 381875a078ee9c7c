"""Arguments that fit each other and that a Triton kernel cannot take: it says why, before work."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel.kernels.accept_prefix import RowState, accept_prefix
from mmaccel.kernels.add_norm import add_norm
from mmaccel.kernels.coarse_rounds import coarse_rounds
from mmaccel.kernels.column_mass import column_mass
from mmaccel.kernels.compact import compact
from mmaccel.kernels.couple import couple
from mmaccel.kernels.dispatch import refuse
from mmaccel.kernels.gated_act import gated_act
from mmaccel.kernels.norm import HeadNorms
from mmaccel.kernels.rope_write import rope_write
from mmaccel.kernels.sample import Settings, sample_frozen
from mmaccel.kernels.unmask import unmask
from mmaccel.kernels.window_attention import window_attention
from tests.kernels.coarse_rounds_cases import Sizes, make_sweep

ROWS, WIDE = torch.zeros(4, 8), torch.zeros(2, 4, dtype=torch.float64)
IDS, INDEX = torch.zeros(2, 2, dtype=torch.int64), torch.arange(2)
OPEN = torch.ones(2, 3, dtype=torch.bool)
WEIGHTS, SLOTS, WORK, *REST = make_sweep(Sizes())


def across(*shape: int) -> Tensor:
    """Numbers of the last axis that are not side by side."""
    return torch.zeros(*shape[:-2], shape[-1], shape[-2]).mT


def attend(operation: Any = window_attention, **others: Tensor) -> Any:
    q, k, v = (torch.zeros(1, 1, n, 64) for n in (2, 8, 8))
    given = {"q": q, "k": k, "v": v} | others
    args = (given["q"], given["k"], given["v"], IDS[0, :1])
    if operation is column_mass:
        args = (given["q"], given["k"], torch.zeros(1, 1, 2), IDS[0, :1])
    return partial(operation, *args, scale=1.0)


def turn(packed: Tensor = ROWS[:2], keys: Tensor | None = None, **options: Any) -> Any:
    store = torch.zeros(4, 1, 4)
    return partial(
        rope_write, packed, None, None, store if keys is None else keys, store, INDEX, **options
    )


def propose(logits: Tensor) -> Any:
    return partial(unmask, logits, OPEN, 1.0, IDS[0], IDS[0], torch.zeros(2, 3).long(), IDS[0, 0])


def draw(logits: Tensor, *rest: Any, branches: int = 1, settings: Settings | None = None) -> Any:
    settings = settings or Settings()
    return partial(
        sample_frozen, logits, branches, settings, None, IDS[0], IDS[0], IDS, IDS[0, 0], *rest
    )


def accept() -> Any:
    numbers = [torch.zeros(2, 9).long(), *(IDS[0] for _ in range(9))]
    kept = torch.ones(2, 2, dtype=torch.bool)
    given = (across(2, 3).long().mT.contiguous().mT, kept, torch.zeros(2, 3), None)
    state = RowState(*numbers)
    return partial(accept_prefix, *given, state, IDS[0, 0], None, origin=1, counts=True)


REFUSED: dict[str, tuple[Any, str]] = {
    "gates in float64": (partial(gated_act, WIDE), "float64"),
    "gates apart": (partial(gated_act, ROWS[:, ::2]), "apart"),
    "hidden states in float64": (partial(add_norm, WIDE, None, None), "float64"),
    "hidden states of three axes": (partial(add_norm, ROWS[None], None, None), "axes"),
    "hidden states apart": (partial(add_norm, ROWS[:, ::2], None, None), "apart"),
    "heads in float64": (turn(torch.zeros(2, 12).double()), "float64"),
    "a cache of another dtype": (
        turn(torch.zeros(2, 12), torch.zeros(4, 1, 4).half()),
        "a cache in torch.float16",
    ),
    "a cache apart": (turn(torch.zeros(2, 12), torch.zeros(4, 1, 8)[..., ::2]), "apart"),
    "a norm over too many numbers": (
        turn(torch.zeros(2, 16400), norms=HeadNorms(torch.zeros(16392), torch.zeros(4))),
        "16392 numbers",
    ),
    "a norm over all heads in groups": (
        turn(torch.zeros(2, 16), norms=HeadNorms(torch.zeros(8), torch.zeros(4)), grouped=True),
        "groups",
    ),
    "tokens of a pass apart": (accept(), "apart"),
    "a store apart": (partial(compact, torch.zeros(1, 4, 2, 8)[..., ::2], IDS[:1, :1]), "apart"),
    "canvases apart": (propose(across(2, 3, 8)), "apart"),
    "canvases in float64": (propose(torch.zeros(2, 3, 8).double()), "float64"),
    "logits apart": (draw(across(2, 2, 100)), "apart"),
    "logits in float64": (draw(torch.zeros(2, 2, 9).double()), "float64"),
    "four branches": (draw(torch.zeros(8, 2, 9), branches=4), "branches"),
    "scores beside filters": (
        draw(torch.zeros(2, 2, 9), None, torch.zeros(2, 9), settings=Settings(top_k=2)),
        "last slot",
    ),
    "scores apart": (
        partial(couple, across(2, 2, 3), ROWS[:2, None, :3], IDS[:, :1], ROWS[:2, :1], ROWS[:2]),
        "apart",
    ),
    "a coarse model too wide": (
        partial(
            coarse_rounds, WEIGHTS._replace(inner=torch.zeros(513, 513)), SLOTS, WORK, *REST, 2
        ),
        "at most 512, received 513",
    ),
    "attention in float64": (attend(**{n: WIDE[None, None] for n in "qkv"}), "float64"),
    "heads too wide": (
        attend(**{n: torch.zeros(1, 1, 2, 320) for n in "qkv"}),
        "128 numbers",
    ),
    "values too wide": (attend(v=torch.zeros(1, 1, 8, 320)), "128 numbers"),
    "keys apart": (attend(k=across(1, 1, 8, 64)), "k whose"),
    "values apart": (attend(v=across(1, 1, 8, 64)), "v whose"),
    "an empty cache": (attend(k=torch.zeros(1, 1, 0, 64), v=torch.zeros(1, 1, 0, 64)), "empty"),
    "masses of keys apart": (attend(column_mass, k=across(1, 1, 8, 64)), "k whose"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_kernel_says_what_it_cannot_take(name: str) -> None:
    pytest.importorskip("triton")
    call, words = REFUSED[name]
    said = refuse(call.func, call.args, call.keywords)
    assert said is not None and words in said


def test_weights_of_all_heads_are_taken_without_groups() -> None:
    pytest.importorskip("triton")
    call = turn(torch.zeros(2, 16), norms=HeadNorms(torch.zeros(8), torch.zeros(4)))
    assert refuse(call.func, call.args, call.keywords) is None
