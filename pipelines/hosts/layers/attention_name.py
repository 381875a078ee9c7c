"""The name under which transformers' modules look up their attention, which passes of ours replace;
passes of several threads may overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

from torch import nn

_FIELD = "_attn_implementation_internal"  # transformers' property of this field sets children too
_names: dict[int, list[tuple[object, str | None]]] = {}  # by id of a config: its own, then ours
_changing = Lock()


def find_configs(model: nn.Module) -> list[Any]:
    """The configurations in which a model's modules look up their attention's name, each once."""
    by_id = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if _FIELD in getattr(config, "__dict__", ()):
            by_id[id(config)] = config
    return list(by_id.values())


@contextmanager
def attention_named(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Until the last thread has left the block, modules look up the attention of this name."""
    entry = (object(), name)
    with _changing:
        for config in configs:
            _names.setdefault(id(config), [(None, getattr(config, _FIELD))]).append(entry)
            setattr(config, _FIELD, name)
    try:
        yield
    finally:
        with _changing:
            for config in configs:
                names = _names[id(config)]
                names.remove(entry)
                setattr(config, _FIELD, names[-1][1])
                if len(names) == 1:
                    del _names[id(config)]


def own_attention(config: Any) -> str | None:
    """The attention that a model's owner chose, whatever another thread's pass has put there."""
    with _changing:
        names = _names.get(id(config))
        return names[0][1] if names else getattr(config, "_attn_implementation", None)
