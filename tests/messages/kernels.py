"""Arguments of kernels that do not fit each other, and values of MMACCEL_KERNELS."""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mmaccel.errors import MissingBackendError, ShapeError
from mmaccel.kernels import dispatch
from mmaccel.kernels.add_norm import add_norm
from mmaccel.kernels.column_mass import column_mass
from mmaccel.kernels.compact import compact
from mmaccel.kernels.gated_act import gated_act
from mmaccel.kernels.noise import uniforms
from mmaccel.kernels.norm import HeadNorms, Norm
from mmaccel.kernels.rope_write import rope_write
from mmaccel.kernels.truncation import guide
from mmaccel.kernels.unmask import unmask
from mmaccel.kernels.window_attention import Blocks, Grid, window_attention
from tests.messages.case import Refused


def _t(*shape: int) -> Tensor:
    return torch.ones(shape)


def _ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _attend(**others: Any) -> Any:
    """Window attention of 2 rows, 4 query heads on 2 key heads, 3 queries, 5 positions."""
    given = {"q": _t(2, 4, 3, 8), "k": _t(2, 2, 5, 8), "v": _t(2, 2, 5, 8), "start": _ids(2)}
    return partial(window_attention, **given | others, scale=1.0)


def _mass(**others: Any) -> Any:
    given = {"q": _t(2, 2, 3, 4), "k": _t(2, 1, 5, 4), "lse": _t(2, 2, 3), "start": _ids(2)}
    return partial(column_mass, **given | others, scale=1.0)


def _rope(packed: int, index: int = 2, angles: Tensor | None = None, **norms: Any) -> Any:
    """Two tokens, one key head of 4 numbers, a cache of 3 places."""
    given = (_t(2, packed), angles, None, _t(3, 1, 4), _t(3, 1, 4), _ids(index))
    return partial(rope_write, *given, norms=HeadNorms(**norms) if norms else None)


def _canvas(logits: Tensor, masked: Tensor) -> Any:
    return partial(unmask, logits, masked, 0.0, _ids(2), _ids(2), _ids(2, 3), _ids())


def _with_kernels(value: str, call: Any) -> Any:
    def refused() -> None:
        with mock.patch.dict(os.environ, {dispatch.VARIABLE: value, "TRITON_INTERPRET": ""}):
            dispatch.find_obstacle.cache_clear()
            call()

    return refused


_NOISE = partial(dispatch.run, uniforms, _ids(2), _ids(2), _ids(2, 1), 5, _ids())
_OPEN = torch.ones(2, 3, dtype=torch.bool)
_BLOCKS = torch.zeros(2, 2, 1, dtype=torch.int32)
_COUNTS = torch.ones(2, 2, dtype=torch.int32)
_SHAPES: dict[str, tuple[Any, str]] = {
    "a norm's update": (partial(add_norm, _t(2, 4), _t(2, 3), None), "update"),
    "a norm's weight": (partial(add_norm, _t(2, 4), None, Norm(_t(3))), "weight"),
    "a norm's bias": (partial(add_norm, _t(2, 4), None, Norm(None, _t(3))), "weight"),
    "a norm before the sum": (
        partial(add_norm, _t(2, 4), _t(2, 4), None, post=Norm(_t(2, 4))),
        "weight",
    ),
    "an odd gate": (partial(gated_act, _t(2, 3)), "even"),
    "packed heads": (_rope(8), "packed"),
    "cache indices": (_rope(12, index=3), "indices"),
    "angles": (_rope(12, angles=_t(2, 6)), "angles"),
    "norms of queries": (_rope(16, q_weight=_t(5), k_weight=None), "queries"),
    "norms of keys": (_rope(16, q_weight=None, k_weight=_t(2, 4)), "keys"),
    "norms of keys by head": (_rope(16, q_weight=_t(8), k_weight=_t(1, 4)), "keys"),
    "norms of one form": (_rope(16, q_weight=_t(2, 4), k_weight=_t(4)), "keys"),
    "biases of queries": (_rope(16, q_weight=_t(4), k_weight=_t(4), q_bias=_t(8)), "queries"),
    "biases of keys": (_rope(16, q_weight=_t(4), k_weight=_t(4), k_bias=_t(1)), "keys"),
    "log-sum-exps": (_mass(lse=_t(2, 1, 3)), "log-sum-exps"),
    "weights of queries": (_mass(weights=_t(3)), "weights"),
    "starts of masses": (_mass(start=_ids(1)), "start"),
    "keys": (_attend(k=_t(1, 2, 5, 8)), "keys"),
    "values": (_attend(v=_t(2, 2, 4, 8)), "values"),
    "starts": (_attend(start=_ids(1)), "start"),
    "a tree": (_attend(tree=torch.ones(4, 4, dtype=torch.bool)), "tree"),
    "a grid's text": (_attend(grid=Grid(_ids(3), 4, 1)), "text"),
    "a number of heads": (_attend(q=_t(2, 3, 3, 8)), "multiple of 2"),
    "an index of blocks": (_attend(blocks=Blocks(_BLOCKS[:1], _COUNTS, 4)), "of blocks"),
    "a count of blocks": (_attend(blocks=Blocks(_BLOCKS, _COUNTS[0], 4)), "of blocks"),
    "lists of fewer rows": (partial(compact, _t(3, 9, 2, 4), _ids(2, 4)), "lists"),
    "lists of more heads": (partial(compact, _t(3, 9, 2, 4), _ids(3, 3, 4)), "lists"),
    "lists of one axis": (partial(compact, _t(3, 9, 2, 4), _ids(4)), "lists"),
    "starts of lists": (partial(compact, _t(3, 9, 2, 4), _ids(3, 1), _ids(2)), "starts"),
    "four branches": (partial(guide, _t(4, 1, 2), 4, 1.0), "4"),
    "a canvas of two axes": (_canvas(_t(2, 3), _OPEN), "canvas"),
    "a canvas of other positions": (_canvas(_t(2, 4, 5), _OPEN), "canvas"),
    "a canvas of no tokens": (_canvas(_t(2, 3, 0), _OPEN), "canvas"),
    "a mask of numbers": (_canvas(_t(2, 3, 4), _ids(2, 3)), "bool"),
}

CASES = (
    *(Refused(name, call, (says,), ShapeError) for name, (call, says) in _SHAPES.items()),
    Refused(
        "another value of the variable",
        _with_kernels("cuda", _NOISE),
        says=("MMACCEL_KERNELS", "auto, torch, triton", "'cuda'"),
    ),
    Refused(
        "a kernel where none runs",
        _with_kernels("triton", _NOISE),
        says=("uniforms", "Triton kernel", "cpu", "MMACCEL_KERNELS=auto"),
        error=MissingBackendError,
    ),
    Refused(
        "a device where no kernel runs",
        _with_kernels("triton", partial(dispatch.check, "cpu")),
        says=("a device that Triton", "received cpu", "MMACCEL_KERNELS=auto"),
        error=MissingBackendError,
    ),
)
