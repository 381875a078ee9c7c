"""Compares what two `generate` calls returned: the same fields, tokens equal, numbers to 1e-5."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-5


def find_difference(expected: Any, received: Any, name: str = "output") -> str | None:
    """What differs first, in words; None where the two are equal.

    Args:
        expected, received: tensors, caches, output objects of transformers, or tuples of them.
        name: of the value, for the answer.
    """
    if hasattr(expected, "layers") and hasattr(received, "layers"):
        return _compare_caches(expected, received, name)
    if type(expected) is not type(received):
        return f"{name}: expected a {type(expected).__name__}, received {_name(received)}"
    if isinstance(expected, Tensor):
        return _compare_tensors(expected, received, name)
    if isinstance(expected, dict):
        if list(expected) != list(received):
            return f"{name}: expected the fields {list(expected)}, received {list(received)}"
        pairs = [(expected[key], received[key], key) for key in expected]
    elif isinstance(expected, (tuple, list)):
        if len(expected) != len(received):
            return f"{name}: expected {len(expected)} entries, received {len(received)}"
        pairs = [
            (one, other, f"{name}[{i}]") for i, (one, other) in enumerate(zip(expected, received))
        ]
    else:
        return None if expected == received else f"{name}: expected {expected}, received {received}"
    return next(filter(None, (find_difference(*pair) for pair in pairs)), None)


def _name(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _compare_tensors(expected: Tensor, received: Tensor, name: str) -> str | None:
    if expected.shape != received.shape or expected.dtype != received.dtype:
        return (
            f"{name}: expected {tuple(expected.shape)} {expected.dtype}, "
            f"received {tuple(received.shape)} {received.dtype}"
        )
    if not expected.is_floating_point():
        differing = int((expected != received).sum())
        return f"{name}: {differing} of {expected.numel()} entries differ" if differing else None
    if torch.allclose(expected, received, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
        return None
    finite = expected.isfinite() & received.isfinite()
    if bool((finite != (expected.isfinite() | received.isfinite())).any()):
        return f"{name}: finite in other places"
    if not bool(finite.any()):
        return f"{name}: other infinities"
    largest = float((expected[finite] - received[finite]).abs().max())
    return f"{name}: differs by up to {largest:.1e}"


def _compare_caches(expected: Any, received: Any, name: str) -> str | None:
    """Caches of one class and length, with equal keys and values in every layer.

    A layer that no pass has filled yet holds no tensors. A static layer's free entries are compared
    too: both are zero.
    """
    if type(expected) is not type(received):
        return f"{name}: expected a {type(expected).__name__}, received {_name(received)}"
    lengths = int(expected.get_seq_length()), int(received.get_seq_length())
    if lengths[0] != lengths[1]:
        return f"{name}: expected {lengths[0]} positions, received {lengths[1]}"
    pairs = []
    for number, (one, other) in enumerate(zip(expected.layers, received.layers)):
        for part in ("keys", "values"):
            values = getattr(one, part, None), getattr(other, part, None)
            pairs.append((*values, f"{name}.layers[{number}].{part}"))
    return next(filter(None, (find_difference(*pair) for pair in pairs)), None)
