"""Token layouts, quantizers and image tokenizers: numbers and tensors that do not fit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mmaccel import Frames
from mmaccel.errors import ShapeError
from mmaccel.tokenizers_vq import delay
from mmaccel.tokenizers_vq.autoencoder import load_tokenizer
from mmaccel.tokenizers_vq.fsq import FiniteScalarQuantizer
from tests.messages.case import Refused

_FRAMES: tuple[dict[str, Any], ...] = (
    {"ranges": ((1, 3, 4),)}, {"ranges": ((3, 3),)}, {"ranges": ((1, 8),)}, {"ends": (2,)},
)  # fmt: skip


def _load_empty() -> None:
    with TemporaryDirectory() as folder:
        load_tokenizer(Path(folder))


_TABLE = delay.delay(3, (0, 1))
CASES = (
    Refused("no frames", partial(delay.flat, 0, 2), ("n_frames", "received 0")),
    *(
        Refused(name, partial(delay.find_frames, table), ("pattern", says), ShapeError)
        for name, table, says in (
            ("two codes of a book at a step", torch.zeros(2, 1, dtype=torch.int64), "two at one"),
            ("steps before the first", -_TABLE, "received torch.int64 [3, 2]"),
        )
    ),
    *(
        Refused(
            f"frames of {given}",
            partial(Frames, **{"ranges": ((1, 3),), "vocab_size": 7, **given}),
            says=("Frames.", "; "),
        )
        for given in _FRAMES
    ),
    Refused("no levels", lambda: FiniteScalarQuantizer([]), says=("levels",)),
    Refused("a folder without a tokenizer", _load_empty, says=("tokenizer.json",)),
)
