"""Orpheus: a Llama that continues text with codes of SNAC, seven every 85 ms.

Canopy Labs, "Orpheus TTS", 2025. Codec: H. Siuzdak, F. Grötschla, L. A. Lanzendörfer, "SNAC:
Multi-Scale Neural Audio Codec", 2024 (arXiv 2410.14411), in the package `snac`. A frame holds one
code of the coarsest level, two of the next and four of the finest, depth first: slots 0, (1, 4) and
(2, 3, 5, 6). Each slot of a frame has its own ids.

Departures: each slot samples from its own ids alone, and the end token is possible between frames
only; the authors sample from the whole vocabulary and drop what does not fit. All frames are
decoded to sound at once, not in overlapping chunks. SNAC's decoder adds noise: here the utterance's
seed determines it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.checks import importing, show
from mmaccel.config_files import read_json
from mmaccel.contracts import TokenModel
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, check_prompt, read_weights
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.hosts.loading.refusal import refusing
from mmaccel.pipelines.models.token_names import find_ids, find_range, load_window
from mmaccel.pipelines.text_to_speech.types import SoundContext
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.frames import Frames

_LEVELS = ((0,), (1, 4), (2, 3, 5, 6))  # slots of a frame, by level of the codec
_SLOTS = sum(map(len, _LEVELS))
_FIRST = 10  # number of the first code's token; lower numbers are control tokens


class OrpheusSpeech:
    """A `SpeechModel`: the language model, its tokenizer, and a `snac.SNAC` of three levels."""

    params = SamplingParams(temperature=0.6, top_p=0.8)
    repetition_penalty = 1.3
    float32_parts = ("codec",)
    voices = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")

    def __init__(self, window: TokenModel, tokenizer: Any, codec: Any) -> None:
        self.window, self.tokenizer, self.codec = window, tokenizer, codec
        if list(codec.vq_strides) != [4, 2, 1]:
            raise UnsupportedModelError(
                f"codec: expected a SNAC of three levels, strides [4, 2, 1], received strides "
                f"{list(codec.vq_strides)}; give snac_24khz"
            )
        self._codes: int = codec.codebook_size
        name = "<custom_token_{}>"
        self._first = find_range(tokenizer, name, _FIRST, _SLOTS * self._codes)
        start, speech, end = find_ids(tokenizer, *(name.format(k) for k in (3, 1, 2)))
        self._before = [start]
        self._after = [*find_ids(tokenizer, "<|eot_id|>", name.format(4), name.format(5)), speech]
        self.layout = Frames.interleaved(
            self._first, self._codes, _SLOTS, window.vocab_size, (end,)
        )
        self.sample_rate: int = codec.sampling_rate
        self.frame_samples = int(codec.hop_length) * codec.vq_strides[0]
        self.sound_context = SoundContext(_find_reach(codec, self.frame_samples))
        self._noise = _find_noise(codec.decoder)

    def split(self, text: str) -> list[str]:
        return [text]

    def encode(self, text: str, voice: str | None) -> list[int]:
        """Fine-tuned models have other voices than `voices`."""
        who: Any = self.voices[0] if voice is None else voice
        is_name = isinstance(who, str) and bool(who.strip()) and who.isprintable()
        if not is_name or set(who) & set(":<>"):
            raise OptionError(
                f"voice: expected a name such as {', '.join(self.voices)}, received {show(who)}; "
                "leave it out"
            )
        words = check_prompt(text, self.tokenizer, "text to say")
        ids: list[int] = self.tokenizer(f"{who.strip()}: {words}")["input_ids"]
        return [*self._before, *ids, *self._after]

    def render(self, tokens: Tensor, seed: int) -> Tensor:
        """The seed determines the codec's noise."""
        slots = torch.arange(len(tokens), device=tokens.device) % _SLOTS
        frames = (tokens - self._first - slots * self._codes).view(-1, _SLOTS)  # [F, 7]
        device = ready(self.codec)
        codes = [frames[:, level].flatten()[None].to(device) for level in map(list, _LEVELS)]
        with self._noise.seeded(seed):
            sound: Tensor = self.codec.decode(codes).flatten()
        return sound


def _find_reach(codec: Any, frame_samples: int) -> int | None:
    """Frames to each side that SNAC's decoder reads for one; None where it attends to others."""
    if codec.attn_window_size is not None:
        return None
    step = math.prod(codec.decoder_rates)  # samples between entries, at the layer in hand
    samples = 3 * step
    for rate in codec.decoder_rates:
        samples += step  # the transposed convolution
        step //= rate
        samples += 3 * (1 + 3 + 9) * step  # kernels of 7, dilated
    return -(-(samples + 3) // frame_samples)


class _CodecNoise:
    """The random numbers that a decoder adds, of a generator that nothing else draws from."""

    def __init__(self) -> None:
        self._lock = Lock()  # one utterance at a time
        self._generator: torch.Generator | None = None  # outside `seeded`: torch's

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Draw by a seed meanwhile, on the CPU, so that noise is the same on every device."""
        with self._lock:
            self._generator = torch.Generator("cpu").manual_seed(seed)
            try:
                yield
            finally:
                self._generator = None

    def draw_like(self, x: Tensor) -> Tensor:
        """Noise `[B, 1, T]` for activations `[B, C, T]`."""
        shape = (len(x), 1, x.shape[-1])
        if self._generator is None:
            return torch.randn(shape, device=x.device, dtype=x.dtype)
        drawn = torch.randn(shape, generator=self._generator, device="cpu", dtype=x.dtype)
        return drawn.to(x.device)


class _NoiseBlock(nn.Module):
    """SNAC's `NoiseBlock` with another source of noise."""

    def __init__(self, linear: nn.Module, noise: _CodecNoise) -> None:
        super().__init__()
        self.linear = linear
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.noise.draw_like(x) * self.linear(x)
        return x + scaled


def _find_noise(decoder: nn.Module) -> _CodecNoise:
    """The source of noise of SNAC's decoder, whose noise blocks are replaced once."""
    from snac.layers import NoiseBlock

    for block in decoder.modules():
        if isinstance(block, _NoiseBlock):
            return block.noise
    noise = _CodecNoise()
    for parent in list(decoder.modules()):
        for name, block in list(parent.named_children()):
            if isinstance(block, NoiseBlock):
                parent.register_module(name, _NoiseBlock(block.linear, noise))
    return noise


def load_orpheus(
    source: Path, tokenizer: Any, codec: Path, load_config: LoadConfig
) -> OrpheusSpeech:
    """Load the language model, and a SNAC in float32 of a folder of the package `snac`."""
    with importing(
        "codec: expected the package snac, which Orpheus' codec is in, received none; "
        "pip install snac"
    ):
        from snac import SNAC
    config = read_json(codec / "config.json", "codec")
    weights = read_weights(codec / "pytorch_model.bin", "codec")
    with refusing(
        f"config.json and pytorch_model.bin of a SNAC in {codec}",
        "what snac refuses",
        "copy the folder again",
        option="codec",
    ):
        sound = SNAC(**config)
        sound.load_state_dict(weights, assign=True)
    sound = sound.to(load_config.device).eval()
    return OrpheusSpeech(load_window(source, load_config), tokenizer, sound)
