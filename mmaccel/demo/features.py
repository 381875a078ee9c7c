"""What the small feature networks share: standard features, and weights of 16 bits on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FILE = "model.safetensors"
_BATCH = 100


class Features(nn.Module):
    """Numbers that say what an item shows, of mean 0 and deviation 1 over the training items once
    `standardise` was called.

    Args:
        width: D, how many.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float32))
        self.register_buffer("scale", torch.ones(width, dtype=torch.float32))

    def raw(self, items: Tensor) -> Tensor:
        """Features `[…, D]` before they are made standard."""
        raise NotImplementedError

    def forward(self, items: Tensor) -> Tensor:
        """Features `[…, D]` float32 of items."""
        return (self.raw(items) - self.mean) / self.scale

    def restore(self, features: Tensor) -> Tensor:
        """`raw` of standard features."""
        return features * self.scale + self.mean

    @torch.no_grad()
    def standardise(self, items: Tensor) -> None:
        """Set mean and deviation by N items; for good, as what the heads read stays the same."""
        found = torch.cat([self(part).flatten(0, -2) for part in items.split(_BATCH)])
        self.mean.add_(found.mean(0) * self.scale)
        self.scale.mul_(found.std(0))


def save_features(model: Features, folder: Path) -> None:
    """Write `model.safetensors` in float16, whole or not at all; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    small = {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    partial = folder / f"{FILE}.partial"
    save_file({k: v.contiguous() for k, v in small.items()}, partial)
    partial.replace(folder / FILE)


def read_features(model: Features, folder: Path) -> None:
    """Load weights of `save_features` as float32, and leave the training mode."""
    state = load_file(folder / FILE)
    state = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    model.load_state_dict(state, assign=True)
    model.eval()
