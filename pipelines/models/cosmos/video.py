"""Cosmos' autoregressive models, which continue an image or the beginning of a clip.

NVIDIA, "Cosmos World Foundation Model Platform for Physical AI", 2025 (arXiv 2501.03575), section
5.2: Cosmos-Predict1-4B and 12B. 33 frames of 1024 x 640 pixels are 5 x 40 x 64 tokens of a causal
codec; one frame or nine frames are given. 5B-Video2World and 13B-Video2World also read a text,
which T5-11B encodes; their clips begin with a token that stands for none.

Departures: the authors then refine the decoded frames with a diffusion model, and check inputs and
outputs with guardrail models; neither is included. As the authors do, the last given frame is
repeated up to 33 frames before encoding; the codec is causal, so this changes tokens of the given
frames by rounding alone. T5 runs in the dtype of the transformer, and without padding. Prompts of
more than 512 tokens are refused, not cut.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import show
from mmaccel.config_files import shorten
from mmaccel.contracts import TokenModel
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, check_prompt, refuse_device_map
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.hosts.loading.refusal import refusing
from mmaccel.pipelines.models.cosmos.text import LENGTH, ReadingWindow
from mmaccel.pipelines.models.cosmos.token_model import load_cosmos_window
from mmaccel.pipelines.models.t5 import load_t5
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.decoded import limit
from mmaccel.tokenizers_vq.grid import Grid
from mmaccel.weight_folders import check_memory

FILES = ("encoder.jit", "decoder.jit")
_CODE_LIMIT = 64 * 2**20  # bytes
_OUTSIDE = re.compile(
    r"\b(?:from_file|save|classes)\b|\bops\s*\.\s*(?!(?:prim|aten)\b)\w+|getattr\s*\([^)]*\\"
)


class JitCodec:
    """The discrete video codec (DV) of NVIDIA, "Cosmos Tokenizer", 2024, from a folder of `FILES`.

    Causal: the first frame is one frame of tokens, each following group of frames another. Both
    run without TorchScript's optimiser, which recompiles after the first calls and then rounds
    differently (pytorch/pytorch issue 74534).
    """

    def __init__(self, folder: Path, load_config: LoadConfig) -> None:
        self._load_config, self._folder = load_config, folder
        self._encoder, self._decoder = (_load(folder / name, load_config) for name in FILES)

    def __getstate__(self) -> dict[str, Any]:
        """TorchScript modules are pickled as the content of their files."""
        return vars(self) | {name: _to_bytes(vars(self)[name]) for name in ("_encoder", "_decoder")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for name in ("_encoder", "_decoder"):
            content = io.BytesIO(state[name])
            vars(self)[name] = torch.jit.load(content, map_location=self._load_config.device)

    def to(self, device: Any, dtype: torch.dtype | None) -> JitCodec:
        """Read both files again for another device or dtype: their constants do not move."""
        old = self._load_config
        config = replace(old, device=device or old.device, dtype=dtype or old.dtype)
        self._encoder, self._decoder = (_load(self._folder / name, config) for name in FILES)
        self._load_config = config
        return self

    @torch.no_grad()
    def encode(self, frames: Tensor) -> Tensor:
        """Tokens `[f, h, w]` int64 of frames `[F, 3, H, W]` float in -1..1."""
        clip = frames.transpose(0, 1)[None].to(self._load_config.device, self._load_config.dtype)
        with torch.jit.optimized_execution(False):
            tokens: Any = self._encoder(clip)
        if isinstance(tokens, tuple):  # (tokens, codes, training loss)
            tokens = tokens[0]
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.ndim != 4:
            raise UnsupportedModelError(
                f"codec: expected an encoder to whole numbers, one a token, received another in "
                f"{self._folder}; give that of Cosmos-Tokenize1-DV8x16x16-720p"
            )
        return tokens[0].long()

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """Frames `[F, 3, H, W]` float32 of tokens `[f, h, w]` in about -1..1."""
        with torch.jit.optimized_execution(False):
            frames: Tensor = self._decoder(tokens[None].to(self._load_config.device))
        return frames[0].transpose(0, 1).float()


def _to_bytes(module: Any) -> bytes:
    content = io.BytesIO()
    torch.jit.save(module, content)
    return content.getvalue()


def _load(file: Path, load_config: LoadConfig) -> Any:
    if not file.is_file():
        raise UnsupportedModelError(
            f"codec: expected {' and '.join(FILES)} in {file.parent}, received no {file.name}; "
            "give the folder of Cosmos-Tokenize1-DV8x16x16-720p"
        )
    with refusing(
        f"TorchScript in {file}", "what torch refuses", "copy the folder again", option="codec"
    ):
        if not load_config.trust_remote_code:
            check_script(file)
        check_memory(file.stat().st_size, str(file), "codec")
        module = torch.jit.load(str(file), map_location=load_config.device)
        return module.eval().to(load_config.dtype)


def check_script(file: Path) -> None:
    """Refuse TorchScript that could reach files or C++ classes; torch would run it while loading.

    Of torch's operators `from_file` and `save` open files; classes and other libraries' operators
    could do anything.
    """
    with zipfile.ZipFile(file) as archive:
        members = [m for m in archive.infolist() if m.filename.endswith(".py")]
        if sum(member.file_size for member in members) > _CODE_LIMIT:
            raise UnsupportedModelError(
                f"codec: expected at most {_CODE_LIMIT} bytes of code in {file}, received more; "
                "copy the folder again"
            )
        texts = [archive.read(member).decode("utf-8", "replace") for member in members]
    words = sorted({match[0] for text in texts for match in _OUTSIDE.finditer(text)})
    if words:
        raise UnsupportedModelError(
            f"codec: expected TorchScript of tensor operators in {file}, received code that names "
            f"{', '.join(map(shorten, words[:3]))}, which can reach files; read that code, then "
            "pass trust_remote_code=True (--trust-remote-code) if you trust it"
        )


_TIME, _SPACE = 8, 16  # frames, and pixels per side, of one token
_STARTS = (1, 9)  # possible numbers of given frames: one or two frames of tokens


class CosmosVideo:
    """A `VideoModel`; `shape` has frames, rows and columns of a clip's tokens."""

    params = SamplingParams(temperature=1.0, top_p=0.8)
    fps = 25.0

    def __init__(self, window: TokenModel, shape: tuple[int, int, int], codec: JitCodec) -> None:
        self.window, self.codec = window, codec
        self.n_frames, rows, columns = shape
        self.layout = Grid(rows, columns, window.vocab_size)
        self.size = (columns * _SPACE, rows * _SPACE)
        self.starts = tuple(n for n in _STARTS if (n - 1) // _TIME + 1 < self.n_frames)

    def encode_prompt(self, prompt: str | None) -> list[int]:
        if prompt is not None:
            raise OptionError(
                f"prompt: expected none with a model that reads no text, received {show(prompt)}; "
                "leave it out, or take nvidia/Cosmos-Predict1-5B-Video2World"
            )
        return []

    def begin(self, prompt: list[int], given: Tensor) -> Tensor:
        return given.flatten()

    def encode(self, frames: Tensor) -> Tensor:
        missing = (self.n_frames - 1) * _TIME + 1 - len(frames)
        whole = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
        tokens = self.codec.encode(whole)
        shape = (self.n_frames, self.layout.rows, self.layout.width)
        lowest, highest = int(tokens.min()), int(tokens.max())
        if tokens.shape != shape or lowest < 0 or highest >= self.window.vocab_size:
            raise UnsupportedModelError(
                f"codec: expected tokens {list(shape)} in 0..{self.window.vocab_size - 1}, "
                f"received {list(tokens.shape)} in {lowest}..{highest}; give a model and a codec "
                "that belong together"
            )
        return tokens[: (len(frames) - 1) // _TIME + 1]

    def render(self, tokens: Tensor) -> Tensor:
        frames = limit(self.codec.decode(tokens), -1, "frames: expected values")
        return frames.add(1).mul(127.5).to(torch.uint8).permute(0, 2, 3, 1).cpu()


class CosmosTextVideo(CosmosVideo):
    """A `VideoModel` that also reads a text, by T5's tokenizer (`words`) and encoder."""

    window: ReadingWindow

    def __init__(
        self,
        window: ReadingWindow,
        shape: tuple[int, int, int],
        codec: JitCodec,
        *,
        words: Any,
        text_encoder: Any,
    ) -> None:
        super().__init__(window, shape, codec)
        width = text_encoder.config.d_model
        if width != window.context:
            raise UnsupportedModelError(
                f"text_encoder: expected a T5 of {window.context} channels, received one of "
                f"{width}; give google-t5/t5-11b, or the one that the model was trained with"
            )
        self.words = words
        self.text_encoder = text_encoder

    def encode_prompt(self, prompt: str | None) -> list[int]:
        text = check_prompt(prompt, self.words, "what happens in the clip")
        ids: list[int] = self.words(text, truncation=False)["input_ids"]
        if len(ids) > LENGTH:
            raise OptionError(
                f"prompt: expected at most {LENGTH} tokens, received {len(ids)}; shorten the prompt"
            )
        return ids

    def begin(self, prompt: list[int], given: Tensor) -> Tensor:
        ids = torch.tensor([prompt], device=ready(self.text_encoder), dtype=torch.int64)
        features = self.text_encoder(input_ids=ids).last_hidden_state[0]  # [n, context]
        ready(self.window.model)
        self.window.read(features)
        first = given.new_tensor([self.window.first_token])
        return torch.cat((first, given.flatten()))


def load_cosmos(
    source: Path, codec: Path, load_config: LoadConfig, find_text_encoder: Callable[[], Path]
) -> tuple[CosmosVideo, Path | None]:
    """Load the transformer, the codec, and T5 where a text is read; the model, and T5's folder."""
    refuse_device_map(load_config, "Cosmos")
    frames = JitCodec(codec, load_config)
    window, shape = load_cosmos_window(source, load_config)
    if not isinstance(window, ReadingWindow):
        return CosmosVideo(window, shape, frames), None
    folder = find_text_encoder()
    words, encoder = load_t5(folder, load_config, "text_encoder")
    return CosmosTextVideo(window, shape, frames, words=words, text_encoder=encoder), folder
