"""What `TextToSpeech` needs of a model that speaks; one class for each family has it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from mmaccel.contracts import TokenModel
from mmaccel.samplers.filters import Filters
from mmaccel.tokenizers_vq.frames import Frames


class SpeechModel(Protocol):
    """Text to prompts, and a codec's codes to sound.

    Attributes:
        window: predicts codes, token after token.
        layout: which ids a slot may take, and which end an utterance.
        filters: temperature and truncation as the model's authors recommend.
        repetition_penalty: as they recommend; 1 is none. It counts the whole prefix.
        sample_rate: of the sound, in Hz.
        frame_samples: of sound for one frame of `layout.columns` tokens.
        voices: names its authors list; empty where a model takes none.
    """

    window: TokenModel
    layout: Frames
    filters: Filters
    repetition_penalty: float
    sample_rate: int
    frame_samples: int
    voices: tuple[str, ...]

    def encode(self, text: str, voice: str | None) -> list[int]:
        """A text, checked, as prompt ids.

        Args:
            text: what is to be said.
            voice: by whom; None is the model's usual one.

        Raises:
            OptionError: nothing the model can say, or a voice for a model that takes none.
        """

    def render(self, tokens: Tensor, seed: int) -> Tensor:
        """Tokens of whole frames to sound.

        Args:
            tokens: `[n]` int64, without an end token; n is a positive multiple of the layout's
                columns.
            seed: of the utterance, for codecs that draw once more between codes and sound.

        Returns:
            `[n / columns * frame_samples]` float32 in -1..1, on the CPU.
        """
