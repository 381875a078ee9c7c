"""Blocks of a VQGAN: residual, attention, changes of resolution, and a level made of them.

Names of parameters are those of LlamaGen's official checkpoints; see `mmaccel.tokenizers_vq.vqgan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F


class Level(nn.Module):
    """Residual blocks of one resolution, each followed by attention or not, then a change of it."""

    def __init__(
        self, before: int, width: int, n_blocks: int, attends: bool, scale: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self.res = nn.ModuleList(Residual(width if k else before, width) for k in range(n_blocks))
        self.attn = nn.ModuleList(Attention(width) for _ in range(n_blocks * attends))
        for name, module in scale.items():
            self.add_module(name, module)
        self._scale = list(scale)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, before, h, w]` to `[B, width, h', w']`."""
        for k, block in enumerate(self.res):
            hidden = block(hidden)
            hidden = self.attn[k](hidden) if len(self.attn) else hidden
        return run((getattr(self, name) for name in self._scale), hidden)


class Residual(nn.Module):
    """Two convolutions beside the identity, or beside a convolution of width 1."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.norm1 = make_norm(before)
        self.conv1 = nn.Conv2d(before, width, 3, padding=1)
        self.norm2 = make_norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        if before != width:
            self.nin_shortcut = nn.Conv2d(before, width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, before, h, w]` to `[B, width, h, w]`."""
        change = self.conv1(F.silu(self.norm1(hidden)))
        change = self.conv2(F.silu(self.norm2(change)))
        return change + (self.nin_shortcut(hidden) if hasattr(self, "nin_shortcut") else hidden)


class Attention(nn.Module):
    """One head over all places of the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = make_norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, width, h, w]` to the same."""
        normed, rows = self.norm(hidden), hidden.shape[2]
        q, k, v = (rearrange(f(normed), "b c h w -> b 1 (h w) c") for f in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v)
        return hidden + self.proj_out(rearrange(seen, "b 1 (h w) c -> b c h w", h=rows))


class Halve(nn.Module):
    """Half the sides, padded on the right and at the bottom."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, C, h, w]` to `[B, C, h/2, w/2]`."""
        return self.conv(F.pad(hidden, (0, 1, 0, 1)))


class Double(nn.Module):
    """Twice the sides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, C, h, w]` to `[B, C, 2h, 2w]`."""
        return self.conv(F.interpolate(hidden, scale_factor=2.0))


def make_middle(width: int) -> nn.ModuleList:
    """What the lowest resolution has between encoder and bottleneck, and behind it."""
    return nn.ModuleList([Residual(width, width), Attention(width), Residual(width, width)])


def run(modules: Iterable[nn.Module], hidden: Tensor) -> Tensor:
    """One after another."""
    for module in modules:
        hidden = module(hidden)
    return hidden


def make_norm(width: int) -> nn.GroupNorm:
    """The norm of all blocks: 32 groups."""
    return nn.GroupNorm(32, width, eps=1e-6)
