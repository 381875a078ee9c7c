"""XAttention: R. Xu et al., ICML 2025 (arXiv:2503.16428), section 2. An antidiagonal of a block
crosses every vertical and every slanting line of the map. Every `stride`-th is summed up: strided
queries in reverse order times strided keys. The sums of a group of queries go through a softmax,
and of each tile of queries the fewest blocks are computed that have a share of it.

Departures: the first block and the tile's own are computed in any case and count first. Query heads
that read one key head see the union of their blocks. Passes after the prompt's attend to
everything, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from mmaccel.checks import within
from mmaccel.kernels.choose_blocks import choose_mass
from mmaccel.reduction.sparse_attention.contract import PromptBlocks, PromptMethod


@dataclass(frozen=True)
class XAttention(PromptMethod):
    """Computes the blocks of a prompt that antidiagonal sums find.

    Args:
        threshold: the share of the estimated attention, in (0, 1]; 1 changes nothing.
        stride: every how manieth antidiagonal is summed; it divides `block`.

    Loses: in short prompts; one key among `stride` others. Layers whose mask is not causal are
    processed whole.
    Figures: SmolLM2-135M: 98 % right.
    """

    budget: float = field(default=1.0, init=False, repr=False)  # the share is the budget
    threshold: float = within(
        0.9,
        0,
        1,
        "give the share of the estimated attention; 1 computes all",
        above_low=True,
    )
    block: int = within(64, 1, 1024, "64 suits most models", multiple_of="stride")
    stride: int = within(8, 1, hint="8 suits most models")

    @property
    def is_whole(self) -> bool:
        return self.threshold >= 1

    def estimate(self, prompt: PromptBlocks) -> Tensor:
        """Shares `[R, H, G, N, N]` of the blocks in the attention of each tile."""
        stride = self.stride
        # groups of `stride` entries; entry s of a group of keys meets entry stride - 1 - s of one
        # of queries: [R, H, (G,) N P / stride, stride D]
        queries = prompt.queries.unflatten(3, (-1, stride)).flip(4).flatten(4)
        keys = prompt.keys.unflatten(2, (-1, stride)).flatten(3)
        scores = (queries @ keys[:, :, None].mT).float() * (prompt.scale / stride)
        real = prompt.is_real.unflatten(1, (-1, stride)).any(2)  # [R, M]
        n_groups = real.shape[1]
        later = real.new_ones(n_groups, n_groups).triu(1)
        hidden = later | ~real[:, None]  # [R, M, M]; a group of padding sees what is before it
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
        weights = weights.where(real[:, None, None, :, None], 0)
        per_block = prompt.size // stride
        mass = weights.unflatten(-1, (-1, per_block)).sum(-1)
        mass = mass.unflatten(-2, (-1, per_block)).sum(-2)  # [R, H, G, N, N]
        return mass / mass.sum(-1, keepdim=True).clamp(min=1e-9)

    def choose_prompt(self, prompt: PromptBlocks) -> Tensor:
        """The fewest blocks of each tile that have the share, `[R, H, N, N]` bool."""
        return choose_mass(self.estimate(prompt), self.threshold, prompt.is_kept).any(2)
