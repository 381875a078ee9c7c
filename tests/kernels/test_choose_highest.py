"""The highest scores of rows, ties included."""

from __future__ import annotations

import torch

from mmaccel.kernels.choose_blocks import choose_highest


def test_against_a_stable_sort() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(0, 5, (40, 3, 17), generator=generator).float()  # many ties
    scores[::7, :, 9:] = float("-inf")
    scores[::5, :, 2] = float("inf")
    wanted = torch.randint(0, 13, (40, 1, 1), generator=generator)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    rank = order.argsort(dim=-1)
    assert torch.equal(choose_highest(scores, wanted, 12), rank < wanted)


def test_a_row_in_a_wider_batch() -> None:
    scores = torch.randint(0, 3, (1, 1, 100), generator=torch.Generator().manual_seed(1)).float()
    wider = torch.nn.functional.pad(scores, (0, 4000), value=float("-inf"))
    wanted = torch.tensor([[[30]]])
    chosen = choose_highest(wider, wanted, 400)
    assert torch.equal(chosen[..., :100], choose_highest(scores, wanted, 31))
    assert int(chosen.sum()) == 30
