"""What a video pipeline hands out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.results import Stats


@dataclass(frozen=True)
class Clip:
    """One clip.

    Attributes:
        index: of its seed in the list asked for.
        seed: its own, in 0..2**64-1.
        frames: `[F, height, width, 3]` uint8, on the CPU; the given ones, as the codec sees them,
            come first.
        n_given: how many of them were given.
        n_read: frames of tokens that these were read as.
        fps: frames a second.
        tokens: `[frames, rows, columns]` int64, those of the given frames included, on the CPU.
        passes: forward passes it took part in.
        total_variation: as in `mmaccel.Stats`, of this clip.
    """

    index: int
    seed: int
    frames: Tensor
    n_given: int
    n_read: int
    fps: float
    tokens: Tensor
    passes: int
    total_variation: float = 0.0


@dataclass(frozen=True)
class Clips:
    """Finished clips, in the order of the seeds, and what they cost."""

    clips: list[Clip]
    stats: Stats

    def __len__(self) -> int:
        """How many there are."""
        return len(self.clips)

    def __getitem__(self, index: int) -> Clip:
        """One of them."""
        return self.clips[index]
