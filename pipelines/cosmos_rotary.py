"""Rotary positions along time, height and width, as Cosmos' autoregressive models have them.

NVIDIA, "Cosmos World Foundation Model Platform for Physical AI", 2025 (arXiv 2501.03575), section
5.2: a token of a clip is turned by the angles of its frame, its row and its column, each in a part
of the head's channels, and the larger models stretch low frequencies by YaRN (Peng et al., 2023,
arXiv 2309.00071) without its factor on the attention. Frequencies and their order are those of the
published code; read there, written anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Yarn:
    """How far a model was stretched beyond the clips it was first trained on.

    Attributes:
        shape: frames, rows and columns of those clips, in tokens.
        scale: by which low frequencies are divided.
        fast, slow: turns over those clips above which a frequency stays, and below which it is
            divided.
    """

    shape: tuple[int, int, int]
    scale: float = 2.0
    fast: float = 4.0
    slow: float = 1.0

    def stretch(self, frequencies: Tensor, length: int) -> Tensor:
        """Frequencies of an axis that was `length` tokens long."""
        high, low = (2 * math.pi * turns / length for turns in (self.fast, self.slow))
        kept = ((frequencies - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.scale)


def clip_angles(
    shape: tuple[int, int, int], head_dim: int, theta: float, yarn: Yarn | None = None
) -> Tensor:
    """Angles of all tokens of a clip, in raster order.

    Args:
        shape: frames T, rows H and columns W, in tokens.
        head_dim: D of a head; a third of its pairs, rounded down, each for height and width.
        theta: base of the frequencies.
        yarn: None for models that were not stretched.

    Returns:
        `[T * H * W, D / 2]` float32: pairs of time first, then of height, then of width.
    """
    plane = head_dim // 6
    angles = []
    for axis, pairs in enumerate((head_dim // 2 - 2 * plane, plane, plane)):
        frequencies = 1.0 / theta ** (torch.arange(pairs, dtype=torch.float32) / pairs)
        if yarn is not None:
            frequencies = yarn.stretch(frequencies, yarn.shape[0 if axis == 0 else 1])
        along = torch.outer(torch.arange(shape[axis], dtype=torch.float32), frequencies)
        seen = [pairs if k == 3 else shape[k] if k == axis else 1 for k in range(4)]
        angles.append(along.view(seen).expand(*shape, pairs))
    return torch.cat(angles, -1).flatten(0, 2)


class ClipRotary(nn.Module):
    """Stands where a transformers model has its rotary embedding; a position is a token's number.

    Args:
        angles: see `clip_angles`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, angles: Tensor) -> None:
        super().__init__()
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions.

        Args:
            x: of whose dtype they are to be.
            position_ids: `[R, W]` int64; what lies behind the clip gets the angles of its end, as
                such positions are computed for nothing.

        Returns:
            Two of `[R, W, D]`.
        """
        at = position_ids.clamp(max=len(self.cos) - 1)
        return self.cos[at].to(x.dtype), self.sin[at].to(x.dtype)
