"""Token layouts and quantizers: numbers that do not fit each other."""

from __future__ import annotations

from functools import partial
from typing import Any

from mmaccel import Frames
from mmaccel.tokenizers_vq.fsq import FiniteScalarQuantizer
from tests.messages.case import Refused

_FRAMES: tuple[dict[str, Any], ...] = (
    {"ranges": ((1, 3, 4),)}, {"ranges": ((3, 3),)}, {"ranges": ((1, 8),)}, {"ends": (2,)},
)  # fmt: skip


CASES = (
    *(
        Refused(
            f"frames of {given}",
            partial(Frames, **{"ranges": ((1, 3),), "vocab_size": 7, **given}),
            says=("Frames.", "; "),
        )
        for given in _FRAMES
    ),
    Refused("no levels", lambda: FiniteScalarQuantizer([]), says=("levels",)),
)
