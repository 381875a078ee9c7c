"""Compares what two `generate` calls returned: the same fields, tokens equal, numbers close."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Comparison:
    """How two outputs of one call are compared.

    Attributes:
        tolerance: absolute and relative, of numbers that are no tokens.
        mask: `[B, T]`, 0 at columns of the prompt that nobody attends to. Their keys and values in
            a cache may be anything. None where all columns count.
    """

    tolerance: float = 1e-5
    mask: Tensor | None = None

    def find(self, expected: Any, received: Any, name: str = "output") -> str | None:
        """What differs first, in words; None where the two are equal.

        Args:
            expected, received: tensors, caches, output objects of transformers, or tuples of them.
            name: of the value, for the answer.
        """
        if type(expected) is not type(received):
            return f"{name}: expected a {type(expected).__name__}, received {_name(received)}"
        if hasattr(expected, "layers"):
            return self._compare_caches(expected, received, name)
        if isinstance(expected, Tensor):
            return self._compare_tensors(expected, received, name)
        if isinstance(expected, dict):
            if list(expected) != list(received):
                return f"{name}: expected the fields {list(expected)}, received {list(received)}"
            return self._first((expected[key], received[key], key) for key in expected)
        if isinstance(expected, (tuple, list)):
            if len(expected) != len(received):
                return f"{name}: expected {len(expected)} entries, received {len(received)}"
            pairs = enumerate(zip(expected, received))
            return self._first((one, other, f"{name}[{i}]") for i, (one, other) in pairs)
        return None if expected == received else f"{name}: expected {expected}, received {received}"

    def _first(self, pairs: Iterable[tuple[Any, Any, str]]) -> str | None:
        return next(filter(None, (self.find(*pair) for pair in pairs)), None)

    def _compare_tensors(self, expected: Tensor, received: Tensor, name: str) -> str | None:
        if expected.shape != received.shape or expected.dtype != received.dtype:
            return (
                f"{name}: expected {tuple(expected.shape)} {expected.dtype}, "
                f"received {tuple(received.shape)} {received.dtype}"
            )
        if not expected.is_floating_point():
            differing = int((expected != received).sum())
            return (
                f"{name}: {differing} of {expected.numel()} entries differ" if differing else None
            )
        allowed = self.tolerance
        if torch.allclose(expected, received, rtol=allowed, atol=allowed, equal_nan=True):
            return None
        finite = expected.isfinite() & received.isfinite()
        if bool((finite != (expected.isfinite() | received.isfinite())).any()):
            return f"{name}: finite in other places"
        if not bool(finite.any()):
            return f"{name}: other infinities"
        largest = float((expected[finite] - received[finite]).abs().max())
        return f"{name}: differs by up to {largest:.1e}"

    def _compare_caches(self, expected: Any, received: Any, name: str) -> str | None:
        """Caches of one length, with equal keys and values in every layer.

        A layer that no pass has filled yet holds no tensors. The free entries of a static layer
        are compared too: both are zero.
        """
        lengths = int(expected.get_seq_length()), int(received.get_seq_length())
        if lengths[0] != lengths[1]:
            return f"{name}: expected {lengths[0]} positions, received {lengths[1]}"
        return self._first(
            (
                self._visible(getattr(one, part, None), lengths[0]),
                self._visible(getattr(other, part, None), lengths[0]),
                f"{name}.layers[{number}].{part}",
            )
            for number, (one, other) in enumerate(zip(expected.layers, received.layers))
            for part in ("keys", "values")
        )

    def _visible(self, states: Tensor | None, length: int) -> Tensor | None:
        """Keys or values `[B, H, S, D]` of a layer, zero where the mask hides them.

        A sliding layer holds the last S columns of `length` alone.
        """
        if states is None or self.mask is None:
            return states
        mask = self.mask.bool()
        mask = pad(mask, (0, max(length - mask.shape[1], 0)), value=True)[:, :length]
        mask = mask[:, -states.shape[2] :]
        mask = pad(mask, (0, states.shape[2] - mask.shape[1]), value=True)
        return states.where(mask[:, None, :, None], 0)


def _name(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
