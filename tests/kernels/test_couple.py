"""Maximal coupling against hand-made numbers: the distribution, and few changes."""

from __future__ import annotations

import torch

from mmaccel.kernels.couple import couple


def test_by_hand() -> None:
    """p = (.2, .5, .3), q = (.5, .25, .25): 0 stays below 0.4; the residual is (0, .25, .05)."""
    scores = torch.tensor([0.2, 0.5, 0.3]).log().expand(1, 2, 3)
    q = torch.tensor([[[0.5, 0.25, 0.25]]])
    for coin, redraw, bonus, kept, tokens in (
        (0.39, 0.9, 0.1, True, [0, 0]),
        (0.41, 0.82, 0.21, False, [1, 1]),
        (0.41, 0.84, 0.69, False, [2, 1]),
        (0.99, 0.01, 0.71, False, [1, 2]),
    ):
        redraws = torch.tensor([[redraw, bonus]])
        made = couple(scores, q, torch.tensor([[0]]), torch.tensor([[coin]]), redraws)
        assert (made.kept.tolist(), made.verified.tolist()) == ([[kept]], [tokens])
        torch.testing.assert_close(made.p_target[0, 0], torch.tensor([0.2, 0.5, 0.3]))


def test_no_drafts() -> None:
    scores = torch.tensor([[[0.25, 0.75]]]).log()
    none = torch.zeros(1, 0)
    made = couple(scores, torch.zeros(1, 0, 2), none.long(), none, torch.tensor([[0.3]]))
    assert made.kept.shape == (1, 0) and made.verified.tolist() == [[1]]


def test_distribution_and_changes() -> None:
    """30000 drafts from q: tokens follow p, and as many stay as q and p overlap."""
    n, generator = 30_000, torch.Generator().manual_seed(7)
    p, q = torch.tensor([0.1, 0.4, 0.3, 0.2]), torch.tensor([0.4, 0.1, 0.3, 0.2])
    drafts = torch.multinomial(q, n, True, generator=generator).view(n, 1)
    coins, redraws = torch.rand(n, 1, generator=generator), torch.rand(n, 2, generator=generator)
    made = couple(p.log().expand(n, 2, 4), q.expand(n, 1, 4), drafts, coins, redraws)
    for slot in range(2):
        counts = torch.bincount(made.verified[:, slot], minlength=4)
        chi = ((counts - n * p) ** 2 / (n * p)).sum()
        assert float(chi) < 30.7  # 3 degrees of freedom, once in a million
    overlap, kept = float(torch.minimum(p, q).sum()), float(made.kept.double().mean())
    assert abs(kept - overlap) < 5 * (overlap * (1 - overlap) / n) ** 0.5
