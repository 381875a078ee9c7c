"""Layout of speech tokens: frames of a codec's codes in one stream, and the ids of each slot.

Speech models with one stream generate the codes of a frame one after the other. With several codes
per frame (Orpheus: 7, from three levels of the SNAC codec), each slot of the frame has its own ids;
with one code (Llasa, NeuTTS), all slots share one range. Codec: H. Siuzdak, F. Grötschla, L. A.
Lanzendörfer, "SNAC: Multi-Scale Neural Audio Codec", 2024 (arXiv 2410.14411).
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.checks import check_fields, within
from mmaccel.errors import OptionError


@dataclass(frozen=True)
class Frames:
    """Consecutive frames of S slots from slot 0 on; end tokens are possible between frames only.

    The layout forces no token. It does not end a row either: the stop tokens do (transformers'
    `eos_token_id`), which should be those of `ends`.

    Args:
        ranges: S pairs `(lowest, highest + 1)`; slot s of a row allows the ids in `ranges[s % S]`.
            One pair if all slots allow the same ids.
        vocab_size: V of the model.
        ends: ids outside the ranges that the first slot of every frame also allows.

    Raises:
        OptionError: no ranges, an empty range, ids outside the vocabulary, or an end token within
            a range.
    """

    ranges: tuple[tuple[int, int], ...] = within(
        MISSING, 0, "vocab_size", "give a pair (lowest, highest + 1) for each slot", fewest=1
    )
    vocab_size: int = within(MISSING, 1, hint="give the model's")
    ends: tuple[int, ...] = within(
        (), 0, "vocab_size", "write a single end token as (id,)", below_high=True
    )

    def __post_init__(self) -> None:
        check_fields(self, "Frames.")
        wrong: list[Any] = [pair for pair in self.ranges if pair[0] >= pair[1]]
        wrong += [end for end in self.ends if any(low <= end < high for low, high in self.ranges)]
        if wrong:
            raise OptionError(
                f"Frames.ranges: expected pairs (lowest, highest + 1), and ends outside them, "
                f"received {wrong[0]}; check the model's vocabulary"
            )
        object.__setattr__(self, "_tables", {})

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles make their own tables."""
        return type(self), (self.ranges, self.vocab_size, self.ends)

    @classmethod
    def interleaved(
        cls, first: int, codes: int, slots: int, vocab_size: int, ends: tuple[int, ...] = ()
    ) -> Frames:
        """Slots with consecutive ranges of `codes` ids: slot s has those from ``first + s * codes``
        on.
        """
        numbers = (first, codes, slots)
        if not all(isinstance(n, Integral) and not isinstance(n, bool) for n in numbers):
            raise OptionError(
                f"frames: expected integers, received first {first!r}, codes {codes!r} and slots "
                f"{slots!r}; for example first=128266, codes=4096, slots=7"
            )
        ranges = tuple((first + s * codes, first + (s + 1) * codes) for s in range(slots))
        return cls(ranges, vocab_size, ends)

    @property
    def columns(self) -> int:
        """S: the draft "above" is the token of the same slot in the previous frame."""
        return len(self.ranges)

    @property
    def frame(self) -> int:
        """S: the draft "previous-frame" is the same as "above"."""
        return len(self.ranges)

    def forced(self, slots: Tensor) -> Tensor | None:
        """None: nothing is known of slots `[B, W]` in advance."""
        return None

    def allowed(self, slots: Tensor) -> Tensor | None:
        """Slots `[B, W]` to a boolean mask `[B, W, V]`, True for allowed tokens."""
        tables: dict[torch.device, Tensor] = vars(self)["_tables"]
        if slots.device not in tables:
            tables[slots.device] = _table(self, slots.device)
        return tables[slots.device][slots % len(self.ranges)]


@dataclass(frozen=True)
class CodeFrames:
    """Frames of one code of each codebook, of which nothing is known in advance."""

    frame: int  # codes of a frame
    ends: ClassVar[tuple[int, ...]] = ()

    @property
    def columns(self) -> int:
        """0: the codes of a frame form no rows."""
        return 0

    def forced(self, slots: Tensor) -> Tensor | None:
        """None: nothing is known of slots `[B, W]` in advance."""
        return None

    def allowed(self, slots: Tensor) -> Tensor | None:
        """None: all codes are allowed."""
        return None


@lru_cache(maxsize=8)
def _table(frames: Frames, device: torch.device) -> Tensor:
    """`[S, V]` bool: ids allowed at each slot of a frame.

    Equal layouts share a table. Each also holds its own for as long as it lives, because a captured
    graph reads the table by its address, and holds the layout (`GraphEntry.layouts`).
    """
    size = (len(frames.ranges), frames.vocab_size)
    table = torch.zeros(size, dtype=torch.bool, device="cpu")
    for slot, (low, high) in enumerate(frames.ranges):
        table[slot, low:high] = True
    table[0, list(frames.ends)] = True
    return table.to(device)
