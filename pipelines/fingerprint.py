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

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DEPTH = 4  # of containers in containers; what lies deeper counts by identity


def fingerprint(model: nn.Module) -> Hashable:
    """What passes of a model depend on. Cost: a look at every attribute of every module."""
    found: list[Hashable] = []
    configs: dict[int, Any] = {}
    for module in model.modules():
        found.append(_print(vars(module), _DEPTH))
        config = vars(module).get("config")
        if hasattr(config, "__dict__"):
            configs[id(config)] = config
    found += [_print(vars(config), _DEPTH) for config in configs.values()]
    return tuple(found)


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a dtype or the like."""
    return isinstance(value, _PLAIN)


def place_of(tensor: Tensor | None) -> Hashable:
    """Where a tensor lies and how."""
    if tensor is None:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # it has no storage of its own
        address = id(tensor)
    return address, tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()


def _print(value: Any, depth: int) -> Hashable:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return place_of(value)
    if depth and isinstance(value, dict):
        return tuple([(k, _print(v, depth - 1)) for k, v in value.items() if is_plain(k)])
    if depth and isinstance(value, list | tuple | set | frozenset):
        return tuple([_print(v, depth - 1) for v in value])
    return id(value)
