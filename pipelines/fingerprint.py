"""A model's fingerprint: what its passes depend on beside their inputs, as something to compare.

Parameters may change their numbers, which a record reads anew; where they lie it does not. Nor does
it run Python again: so an attribute, a hook, an adapter switched off or another attention must
change the fingerprint. What no module and no configuration knows (a class changed at run time, a
global variable that a forward reads) it cannot see.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device}
_DEPTH = 4  # of containers in containers; what lies deeper counts by identity


def fingerprint(model: nn.Module) -> Hashable:
    """What passes of a model depend on. Cost: a look at every attribute of every module."""
    found: list[Hashable] = []
    configs: dict[int, Any] = {}
    for module in model.modules():
        attributes = module.__dict__
        _note(attributes, found, _DEPTH)
        config = attributes.get("config")
        if hasattr(config, "__dict__"):
            configs[id(config)] = config
    for config in configs.values():
        _note(vars(config), found, _DEPTH)
    return tuple(found)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a dtype or the like."""
    return type(value) in _PLAIN


def place_of(tensor: Tensor | None) -> Hashable:
    """Where a tensor lies and how."""
    if tensor is None:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # it has no storage of its own
        address = id(tensor)
    return address, tensor.dtype, tensor.shape


def _note(container: Any, found: list[Hashable], depth: int) -> None:
    """Add what a container holds: numbers and texts as they are, tensors by their places."""
    found.append(len(container))
    values = container
    if isinstance(container, dict):
        values = container.values()
        if depth < _DEPTH:  # attributes come and go in one order
            found.extend([key for key in container if type(key) in _PLAIN])
    for value in values:
        if type(value) in _PLAIN:
            found.append(value)
        elif isinstance(value, Tensor):
            found.append(place_of(value))
        elif depth and isinstance(value, dict | list | tuple | set | frozenset):
            if value:
                _note(value, found, depth - 1)
            else:
                found.append(0)
        else:
            found.append(id(value))
