"""Row-parallel decoding: several rows of an image at once, each some columns behind the one above.

ZipAR: Y. He et al., "ZipAR: Parallel Autoregressive Image Generation through Spatial Locality",
ICML 2025 (arXiv 2412.04062): a row begins once the row above it has some tokens. PJD: B. Liao et
al., "Parallel Jacobi Decoding for Fast Autoregressive Image Generation", CVPR 2026 (arXiv
2606.05703): each of these rows has a window of drafts of its own. Relaxed: a token is decided
before all tokens in front of it, in raster order, are.

A pass covers a window of several rows, whose slots all hold drafts. A slot's token, which frozen
noise chooses as in `Jacobi`, is final once the pass has read final drafts of all slots before it in
its row and, in the row above, up to `ahead` columns to its right (a shorter row counts as long as
others). Of the rest of that row the model sees the last pass's drafts, corrected by a coarse model
where there is one. Final tokens are drafts that stay.

Cost in exactness: let F be the noise of all slots before a slot. When the slot becomes final is a
function of F, and so are p, the distribution that its token is then drawn from, and p', that of the
model after the tokens that are final in the end. So the token's distribution given F has moved by
TV(p, p'), and that of the sequence by no more than the sum over all slots.
`Stats.total_variation` reports the sum: p' is in the pass in which the prefix reaches the slot.

Departures: ZipAR leaves out what is not decoded of the row above, and PJD masks it; here the model
sees drafts there, as in any window. Keys of all rows below the first open one are computed anew in
each pass. With `ahead` at least a row's length the tokens are those of `Autoregressive`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.contracts import Layout
from mmaccel.kernels.sample import argmax
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.drafting.contract import DraftSource
from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.seeded_sampling import StepwiseDraws, draft_window


@dataclass(frozen=True)
class RowParallel(WindowPolicy):
    """Several rows of an image at once, each some columns behind the one above; reports what it
    costs.

    Args:
        window: tokens processed per pass; of rows that are decoded together, all slots.
        ahead: columns by which a row is ahead of the one below it; a row's length is exact.
        drafts: where drafts come from, as in `Jacobi`; tokens depend on them.

    Memory: distributions `[B, window, V]` float32 of the last pass are stored until the next one.
    Loses: where rows are short (16 tokens let four or five run together) and in large batches on a
    CPU. Models whose tokens form no rows are refused; steps are not captured.
    Figures: `scenes`, window 64: 8.2 tokens a pass for a total variation of 0.024 a token, 72 % of
    captions true (plain loop: 73); 9.0 and 59 % with `ahead=0`.
    """

    window: int = 64
    ahead: int = within(2, 0, 2**31 - 1, "2 suits images, a row's length is exact")
    drafts: str | DraftSource = "auto"

    exactness: ClassVar[Exactness] = "relaxed"
    needs_rows: ClassVar[bool] = True
    takes_guesses: ClassVar[bool] = False

    @property
    def freezes_noise(self) -> bool:
        return True

    def decode(self, run: WindowRun) -> Generation:
        layout = run.prompt.layout
        assert layout is not None
        held = run.steps.declare("p_final")
        first_held = run.steps.declare("first slot")

        def step_fn() -> None:
            draws = StepwiseDraws(run)
            drafts = draft_window(run, draws)  # [B, W-1]
            slots = run.rows.slots
            scores = run.forward()  # [B, W, V]
            wanted = run.backend.run(argmax, scores + draws.noise)
            run.observe(draws.noise)

            was_final = run.rows.is_fixed()  # [B, W]
            matches = was_final[:, :-1] | (wanted[:, :-1] == drafts)
            is_final, is_right = find_final(slots, matches, layout, self.ahead)
            tokens = torch.cat([drafts, wanted[:, -1:]], 1).where(was_final, wanted)

            p = scores.softmax(-1)
            p_final = p
            spent = torch.zeros_like(p[:, :-1, 0])
            if held.value is not None:
                p_before = follow(held.value, slots[:, 0] - first_held.get()[:, 0], slots.shape[1])
                p_final = p_before.where(was_final[..., None], p)
                spent = (p_final - p)[:, :-1].abs().sum(-1) / 2
            held.hold(p_final)
            first_held.hold(slots[:, :1])
            run.rows.fix(is_final)
            run.accept(tokens, is_right, spent)

        return run.run(step_fn)


def find_final(slots: Tensor, matches: Tensor, layout: Layout, ahead: int) -> tuple[Tensor, Tensor]:
    """The slots `[B, W]` whose tokens are final after a pass, and the drafts `[B, W-1]` that were
    right: final, and read by this pass as they are; those are the first of each row of the image.

    `matches` `[B, W-1]` are drafts that are what their slots want, or were final before.
    """
    size = layout.columns
    frame = layout.frame
    rows, columns = slots // size, slots % size  # [B, W]
    if frame:  # whose last row may be shorter
        inside = slots % frame
        rows = slots // frame * -(-frame // size) + inside // size
        columns = inside % size
    rows = rows - rows[:, :1]
    n_rows = int(rows.max()) + 1
    # a grid of the window's rows; slots before the window are final, those behind it are not there
    at = rows * size + columns
    is_match = torch.ones(len(slots), n_rows * size, dtype=torch.bool, device=slots.device)
    is_match.scatter_(1, at[:, :-1], matches)
    is_match.scatter_(1, at[:, -1:], False)
    grid = is_match.view(-1, n_rows, size)
    index = torch.arange(size, device=slots.device)
    final = torch.zeros_like(grid)
    right = torch.zeros_like(grid)
    n_above = torch.full_like(slots[:, 0], size)  # right ones in the row above
    for row in range(n_rows):
        reach = torch.where(n_above < size, n_above - ahead, size)  # columns whose context is final
        n_right = torch.minimum(grid[:, row].long().cumprod(-1).sum(-1), reach).clamp(min=0)
        final[:, row] = index < torch.minimum(n_right + 1, reach)[:, None]
        right[:, row] = index < n_right[:, None]
        n_above = n_right
    return final.flatten(1).gather(1, at), right.flatten(1).gather(1, at[:, :-1])


def follow(p_last: Tensor, moved: Tensor, width: int) -> Tensor:
    """`p_last` `[B, W', V]`, `moved` `[B]` slots on: `[B, W, V]`, past its end its last one."""
    slots = torch.arange(width, device=p_last.device)
    at = (moved[:, None] + slots).clamp(0, p_last.shape[1] - 1)
    return p_last[torch.arange(len(at), device=at.device)[:, None], at]
