"""Passes of embeddings, with positions and what entries read: the steps of a next-scale model,
against transformers' own model over everything at once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate, one_hot

from mmaccel import CausalLMWindow
from mmaccel.contracts import Pass
from tests.fixtures.tiny_lms import build_lm

SIDES = (1, 2, 3)
SIZES = [side * side for side in SIDES]


def embed_scales(table: Tensor, codes: list[Tensor]) -> Tensor:
    """Inputs `[R, n, D]` of the next scale: all codes so far, drawn at its size and added up."""
    side = SIDES[len(codes)]
    total = torch.zeros(len(codes[0]) if codes else 2, table.shape[1], side, side)
    for own, found in zip(SIDES, codes, strict=False):
        picture = table[found].mT.unflatten(2, (own, own))
        total = total + interpolate(picture, size=(side, side), mode="nearest")
    return total.flatten(2).mT


@torch.no_grad()
def at_once(model: Any, inputs: list[Tensor]) -> Tensor:
    """Logits `[R, sum of n, V]` of all scales in one pass of transformers' own model."""
    scale = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    mask = torch.zeros(1, 1, len(scale), len(scale)).masked_fill(
        scale[:, None] < scale, float("-inf")
    )
    positions = torch.arange(len(scale)).expand(2, -1)
    return model(
        inputs_embeds=torch.cat(inputs, 1), attention_mask=mask, position_ids=positions
    ).logits


@pytest.mark.parametrize("fused", [False, True], ids=["model", "fused"])
@torch.no_grad()
def test_the_steps_of_a_next_scale_model(fused: bool) -> None:
    """Every scale is one pass of embeddings over the cache of those before; its entries see each
    other.
    """
    model = build_lm("llama")
    table = torch.randn(40, 32, generator=torch.Generator().manual_seed(5))
    window = CausalLMWindow(model, fused=fused)
    window.reserve(2, sum(SIZES))
    codes: list[Tensor] = []
    inputs: list[Tensor] = []
    logits: list[Tensor] = []
    begin = 0
    for size in SIZES:
        inputs.append(embed_scales(table, codes))
        end = begin + size
        reads = (torch.arange(sum(SIZES) + 1) < end).expand(2, 1, -1)
        start = torch.full((2,), begin)
        logits.append(window.forward(Pass(inputs[-1], start, reads=reads)))
        noise = one_hot(torch.tensor([begin % 2, 1]), 40)[:, None]  # rows differ
        codes.append((logits[-1] + 3 * noise).argmax(-1))
        begin = end
    assert not torch.equal(codes[1][0], codes[1][1])
    torch.testing.assert_close(torch.cat(logits, 1), at_once(model, inputs), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_queries_and_positions_of_a_pass() -> None:
    model = build_lm("llama")
    window = CausalLMWindow(model)
    ids = torch.randint(40, (2, 6), generator=torch.Generator().manual_seed(1))
    window.reserve(2, 12)
    start = torch.zeros(2, dtype=torch.int64)
    positions = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 3, 3]])
    wanted = torch.tensor([[5, 0], [2, 3]])
    found = window.forward(Pass(ids, start, positions=positions, queries=wanted))
    own = model(input_ids=ids, position_ids=positions).logits
    expected = own.gather(1, wanted[..., None].expand(-1, -1, own.shape[-1]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
