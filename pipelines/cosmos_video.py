"""Cosmos' autoregressive models that continue a picture or the beginning of a clip.

NVIDIA, "Cosmos World Foundation Model Platform for Physical AI", 2025 (arXiv 2501.03575), section
5.2: Cosmos-Predict1-4B and 12B. 33 frames of 1024 x 640 pixels are 5 x 40 x 64 tokens of a causal
codec; one frame, or nine, are given, the tokens of the others drawn one after the other.

Departures: the authors then make the decoded frames finer with a diffusion model, and look over
what comes in and goes out with guardrail models; neither is here. Of a first clip they encode all
33 frames, the missing ones repeated; as the codec is causal, the tokens of the given frames are the
same without, up to rounding, but we repeat as they do.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mmaccel.contracts import TokenModel
from mmaccel.errors import NumericsError, UnsupportedModelError
from mmaccel.pipelines.checkpoint import Place
from mmaccel.pipelines.cosmos_window import load_cosmos_window
from mmaccel.pipelines.jit_codec import JitCodec
from mmaccel.samplers.filters import Filters
from mmaccel.tokenizers_vq.grid import Grid

_TIME, _SPACE = 8, 16  # frames, and pixels a side, that a token stands for
_STARTS = (1, 9)  # frames a clip may begin with: one frame of tokens, and two


class CosmosVideo:
    """A `VideoModel`.

    Args:
        window: the transformer.
        shape: frames, rows and columns of a clip's tokens.
        codec: frames to tokens and back.
    """

    filters = Filters(temperature=1.0, top_p=0.8)
    fps = 25.0

    def __init__(self, window: TokenModel, shape: tuple[int, int, int], codec: JitCodec) -> None:
        self.window, self.codec = window, codec
        self.n_frames, rows, columns = shape
        self.layout = Grid(rows, columns, window.vocab_size)
        self.size = (columns * _SPACE, rows * _SPACE)
        self.starts = tuple(n for n in _STARTS if (n - 1) // _TIME + 1 < self.n_frames)

    def encode(self, frames: Tensor) -> Tensor:
        """See `VideoModel.encode`."""
        missing = (self.n_frames - 1) * _TIME + 1 - len(frames)
        whole = torch.cat((frames, frames[-1:].expand(missing, -1, -1, -1)))
        tokens = self.codec.encode(whole)
        wanted = (self.n_frames, self.layout.rows, self.layout.width)
        if tokens.shape != wanted or not 0 <= int(tokens.min()) <= int(tokens.max()) < (
            self.window.vocab_size
        ):
            raise UnsupportedModelError(
                f"codec: expected tokens {list(wanted)} in 0..{self.window.vocab_size - 1}, "
                f"received {list(tokens.shape)} in {int(tokens.min())}..{int(tokens.max())}; give "
                "a model and a codec that belong together"
            )
        return tokens[: (len(frames) - 1) // _TIME + 1]

    def render(self, tokens: Tensor) -> Tensor:
        """See `VideoModel.render`."""
        frames = self.codec.decode(tokens)
        if bool(frames.isnan().any()):
            raise NumericsError(
                "codec: expected frames in -1..1, received NaN; copy its files again"
            )
        return frames.add(1).mul(127.5).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu()


def load_cosmos(source: Path, codec: Path, place: Place) -> CosmosVideo:
    """Load the parts.

    Args:
        source: folder of the transformer.
        codec: folder of a Cosmos tokenizer.
        place: where they go, and in what.

    Raises:
        UnsupportedModelError: files that are missing or of another model, or parts that do not
            belong together.
    """
    frames = JitCodec(codec, place)
    window, shape = load_cosmos_window(source, place)
    return CosmosVideo(window, shape, frames)
