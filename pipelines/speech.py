"""What a speech pipeline hands out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmaccel.results import Stats


@dataclass(frozen=True)
class Utterance:
    """One text, spoken.

    Attributes:
        index: of the text in the list asked for.
        text: it.
        voice: who says it; None is the model's usual voice.
        seed: its own, in 0..2**64-1, which decides it; where one was given for all, that one plus
            `index`, which tells it apart but does not make it again alone.
        waveform: `[samples]` float32 in -1..1, mono, on the CPU.
        sample_rate: in Hz.
        tokens: `[n]` int64, codes of whole frames, on the CPU.
        passes: forward passes it took part in while it was unfinished.
        is_finished: whether the model ended it; False where it was cut at the length asked for.
        total_variation: as in `mmaccel.Stats`, of this utterance.
    """

    index: int
    text: str
    voice: str | None
    seed: int
    waveform: Tensor
    sample_rate: int
    tokens: Tensor
    passes: int
    is_finished: bool
    total_variation: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return len(self.waveform) / self.sample_rate


@dataclass(frozen=True)
class Speech:
    """Finished utterances, in the order of the texts, and what they cost."""

    utterances: list[Utterance]
    stats: Stats

    def __len__(self) -> int:
        """How many there are."""
        return len(self.utterances)

    def __getitem__(self, index: int) -> Utterance:
        """One of them."""
        return self.utterances[index]
