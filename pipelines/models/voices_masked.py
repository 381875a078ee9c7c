"""`voices-masked`: OmniVoice's layout over the words and codec of `voices`, 4 codes every 40 ms.

Departures from `omnivoice.py`: the text is phonemes and a speaker, as in `voices`; how long it
lasts is the sum of its tokens' durations, which `voices.json` has; the codec is that of `voices`,
its stacked layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mmaccel.config_files import read_json, read_settings
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.diffusion_lm.speech_canvas import SpeechCanvas
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.models.omnivoice import load_canvas
from mmaccel.pipelines.models.token_names import find_ids
from mmaccel.pipelines.models.voices import FILE, SpokenWords, VoicesFacts
from mmaccel.pipelines.text_to_speech.types import SoundContext
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.frames import CodeFrames
from mmaccel.tokenizers_vq.speech_codec import SpeechCodec, load_codec


@dataclass(frozen=True)
class MaskedFacts(VoicesFacts):
    """What `voices.json` has besides: how many frames each token of text adds, 0 where none is."""

    durations: dict[str, float]


class MaskedVoices(SpokenWords):
    """A `CanvasSpeech`."""

    params = SamplingParams(temperature=0.0, guidance_scale=2.0)

    def __init__(
        self, window: SpeechCanvas, tokenizer: Any, codec: SpeechCodec, facts: MaskedFacts
    ) -> None:
        super().__init__(tokenizer, codec, facts)
        self.window = window
        self.layout = CodeFrames(window.books)
        self.frame_samples = 2 * codec.hop
        self.sound_context = SoundContext(codec.reach // 2)
        self._durations = facts.durations
        books = codec.books, codec.book_size
        if books != (window.books, window.vocab_size - 1):
            raise UnsupportedModelError(
                f"codec: expected {window.books} books of {window.vocab_size - 1} codes, as the "
                f"model has, received {books[0]} of {books[1]}; give the model's codec"
            )

    def encode(self, text: str, voice: str | None) -> list[int]:
        return self.window.to_canvas(find_ids(self.tokenizer, *self.list_names(text, voice)))

    def unconditional(self) -> list[int]:
        return [self.window.nothing]

    def count_frames(self, text: str, voice: str | None) -> int:
        names = self.list_names(text, voice)
        return max(1, round(sum(self._durations.get(name, 0.0) for name in names)))

    def render(self, tokens: Tensor, seed: int) -> Tensor:
        """The codec is deterministic."""
        codes = tokens.view(1, -1, self.codec.books).to(ready(self.codec))
        sound: Tensor = self.codec.decode_stacked(codes)[0]
        return sound


def load_voices_masked(
    source: Path, tokenizer: Any, codec: Path, load_config: LoadConfig
) -> MaskedVoices:
    """Load the network of a folder with `voices.json`, and the codec in float32."""
    file = source / FILE
    facts = read_settings(MaskedFacts, read_json(file), file)
    sound = load_codec(codec).to(load_config.device)
    return MaskedVoices(load_canvas(source, load_config), tokenizer, sound, facts)
