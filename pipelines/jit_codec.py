"""A video codec that its authors publish as two TorchScript files: frames to tokens and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.checkpoint import Place, unreadable

FILES = ("encoder.jit", "decoder.jit")


class JitCodec:
    """Causal in time: the first frame is a frame of tokens, and every few behind it another.

    NVIDIA, "Cosmos Tokenizer", 2024; the discrete ones for video (DV).

    Both run without the optimiser of TorchScript: it compiles a file anew after the first calls,
    and then rounds in another way (pytorch/pytorch issue 74534, which the authors name too).

    Args:
        folder: with `FILES`.
        place: device and dtype.

    Raises:
        UnsupportedModelError: a file is missing, or no TorchScript.
    """

    def __init__(self, folder: Path, place: Place) -> None:
        self._place, self._folder = place, folder
        self._encoder, self._decoder = (_load(folder / name, place) for name in FILES)

    @torch.no_grad()
    def encode(self, frames: Tensor) -> Tensor:
        """Tokens `[f, h, w]` int64 of frames `[F, 3, H, W]` float in -1..1.

        Raises:
            UnsupportedModelError: the encoder returns no tokens.
        """
        clip = frames.transpose(0, 1)[None].to(self._place.device, self._place.dtype)
        with torch.jit.optimized_execution(False):
            made = self._encoder(clip)  # (tokens, codes, loss of training)
        tokens: Any = made[0] if isinstance(made, tuple) else made
        if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.ndim != 4:
            raise UnsupportedModelError(
                f"codec: expected an encoder to whole numbers, one a token, received another in "
                f"{self._folder}; give that of Cosmos-Tokenize1-DV8x16x16-720p"
            )
        return tokens[0].long()

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """Frames `[F, 3, H, W]` float32 of tokens `[f, h, w]`; in -1..1, or a little beyond."""
        with torch.jit.optimized_execution(False):
            frames: Tensor = self._decoder(tokens[None].to(self._place.device))
        return frames[0].transpose(0, 1).float()


def _load(file: Path, place: Place) -> Any:
    if not file.is_file():
        raise UnsupportedModelError(
            f"codec: expected {' and '.join(FILES)} in {file.parent}, received no {file.name}; "
            "give the folder of Cosmos-Tokenize1-DV8x16x16-720p"
        )
    try:
        module = torch.jit.load(str(file), map_location=place.device)
    except unreadable() as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise UnsupportedModelError(
            f"codec: expected TorchScript in {file}, received what torch refuses ({reason}); "
            "copy the folder again"
        ) from error
    return module.eval().to(place.dtype)
