"""The hidden states that attention modules of transformers read: what a module is called with, kept
by a hook until the attention function is called for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

from torch import Tensor, nn

from mmaccel.errors import UnsupportedModelError


class AttentionInputs:
    """What the module that is about to attend was called with."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._hidden: Tensor | None = None
        self._thread = 0

    @contextmanager
    def listening(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Inside the block, what this thread calls these modules with is kept."""
        self._thread = get_ident()
        with ExitStack() as stack:
            for module in modules:
                handle = module.register_forward_pre_hook(self._keep, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def take(self, module: nn.Module) -> Tensor:
        if self._module is not module or self._hidden is None:
            raise UnsupportedModelError(
                "kv_cache: expected attention modules with a layer_idx that take hidden states "
                f"first, as those of transformers do, received a {type(module).__name__}; leave "
                "out what reads hidden states"
            )
        hidden = self._hidden
        self._module = None
        self._hidden = None
        return hidden

    def _keep(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if get_ident() != self._thread:
            return
        first = args[0] if args else options.get("hidden_states")
        self._module = module
        self._hidden = first if isinstance(first, Tensor) else None


def find_attending(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that attend as a numbered layer, and maybe modules around them."""
    return [
        module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)
    ]
