"""What users hand over: the model in it (compiled, wrapped, part of a pipeline), and switches."""

from __future__ import annotations

from typing import Any

from mmaccel.errors import OptionError, UnsupportedModelError


def unwrap(target: Any) -> Any:
    """The model that torch compiled or peft wrapped, or `target` itself."""
    while hasattr(target, "_orig_mod"):
        target = target._orig_mod
    if hasattr(target, "peft_config") and hasattr(target, "get_base_model"):
        target = target.get_base_model()
    return target


def find_generator(target: Any) -> Any:
    """The part of `target` whose `generate` is to be served.

    Args:
        target: a transformers model; one compiled by torch or wrapped by peft; or a diffusers
            pipeline, of whose components exactly one generates.

    Returns:
        That model, or `target` itself where there is nothing to look into.

    Raises:
        UnsupportedModelError: a pipeline with no such component, or with several.
    """
    target = unwrap(target)
    parts = getattr(target, "components", None)
    if not isinstance(parts, dict) or hasattr(type(target), "_sample"):
        return target
    found = {name: part for name, part in parts.items() if hasattr(type(part), "_sample")}
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise UnsupportedModelError(
            f"attach: expected a pipeline with one component that generates, received a "
            f"{type(target).__name__} with {names}; attach to the component itself"
        )
    return find_generator(next(iter(found.values())))


def check_switch(name: str, value: Any) -> None:
    """Refuse an option that only looks like yes or no, such as "no".

    Raises:
        OptionError: not a bool.
    """
    if not isinstance(value, bool):
        raise OptionError(f"{name}: expected True or False, received {value!r}; write True")
