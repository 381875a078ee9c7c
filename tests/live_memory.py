"""Bytes of tensors that live at once: storages that operators made, less those that were freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Measures while a `with` block runs; what an operator needs for itself alone is not seen.

    Args:
        held: tensors that were there before, such as a model's weights; they count nothing.

    Attributes:
        peak: bytes, the most that lived at the end of an operator.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in held}
        self._live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._live -= self._sizes.pop(key)
