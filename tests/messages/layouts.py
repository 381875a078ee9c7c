"""Token layouts, quantizers and image tokenizers: numbers and tensors that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from mmaccel import Frames, Grid
from mmaccel.errors import ShapeError, UnsupportedModelError
from mmaccel.pipelines.models.llamagen.text_to_image import load_tokenizer as load_vqgan
from mmaccel.tokenizers_vq.autoencoder import ImageTokenizer, ImageTokenizerConfig
from mmaccel.tokenizers_vq.fsq import FiniteScalarQuantizer
from mmaccel.tokenizers_vq.vqgan import VQGAN, VQGANConfig
from tests.messages.case import Refused

_SMALL = {
    "size": 16, "levels": [5, 3], "encoder_width": 8, "encoder_depth": 0, "decoder_width": 8,
    "decoder_depth": 0, "fine_width": 8, "fine_depth": 0,
}  # fmt: skip
_VQGAN = VQGANConfig(
    multipliers=(1, 2), channels=32, z_channels=16, n_codes=20, code_width=4, n_blocks=1
)
_GRIDS = (
    {"rows": 0}, {"width": 0}, {"tokens": (3, 3)}, {"tokens": (-1, 3)}, {"tokens": (0, 9)},
    {"row_end": 8}, {"image_end": -1},
)  # fmt: skip
_FRAMES: tuple[dict[str, Any], ...] = (
    {"ranges": ()}, {"ranges": (1, 3)}, {"ranges": ((1, 3, 4),)}, {"ranges": ((1.0, 3),)},
    {"ranges": ((3, 3),)}, {"ranges": ((1, 3), (-1, 2))}, {"ranges": ((1, 8),)}, {"ends": (7,)},
    {"ends": (-1,)}, {"ends": 6}, {"ends": (2,)}, {"vocab_size": None},
)  # fmt: skip


def _tokenizer(act: Callable[[ImageTokenizer], Any]) -> Callable[[], Any]:
    return lambda: act(ImageTokenizer(ImageTokenizerConfig(**_SMALL)))


def _vqgan(lost: str = "", **changes: torch.Tensor) -> Callable[[], Any]:
    def load() -> None:
        state = VQGAN(_VQGAN, (4, 6)).state_dict()
        state |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
        load_vqgan({name: state[name] for name in state if name != lost}, (4, 6), _VQGAN)

    return load


CASES = (
    *(
        Refused(
            f"a grid of {given}",
            partial(Grid, **{"rows": 2, "width": 2, "vocab_size": 8, **given}),
            says=(f"Grid.{next(iter(given))}: ",),
        )
        for given in _GRIDS
    ),
    *(
        Refused(
            f"frames of {given}",
            partial(Frames, **{"ranges": ((1, 3),), "vocab_size": 7, **given}),
            says=("frames: ", "; "),
        )
        for given in _FRAMES
    ),
    Refused("no levels", lambda: FiniteScalarQuantizer([]), says=("levels",)),
    Refused("a level of one value", lambda: FiniteScalarQuantizer([5, 1]), says=("levels",)),
    Refused(
        "images of another size",
        _tokenizer(lambda own: own.encode(torch.rand(1, 3, 20, 16))),
        says=("[B, 3, 16, 16]", "[1, 3, 20, 16]"),
        error=ShapeError,
    ),
    Refused(
        "tokens of another number",
        _tokenizer(lambda own: own.decode(torch.zeros(1, 15, dtype=torch.int64))),
        says=("[B, 16]",),
        error=ShapeError,
    ),
    Refused(
        "tokens of other ids",
        _tokenizer(lambda own: own.decode(torch.full((1, 16), 15))),
        says=("0..14",),
        error=ShapeError,
    ),
    Refused(
        "a VQGAN with one tensor more",
        _vqgan(conv=torch.zeros(1)),
        says=("Unexpected key", '"conv"'),
        error=UnsupportedModelError,
    ),
    Refused(
        "a VQGAN with a tensor of another shape",
        _vqgan(quant_conv__bias=torch.zeros(9)),
        says=("size mismatch for quant_conv.bias",),
        error=UnsupportedModelError,
    ),
    Refused(
        "a VQGAN with one tensor less",
        _vqgan("decoder.mid.1.k.weight"),
        says=("Missing key", '"decoder.mid.1.k.weight"'),
        error=UnsupportedModelError,
    ),
)
