"""Finds the model in a target of `attach`: compiled, wrapped, or part of a pipeline."""

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
    """The part of `target` whose `generate` is served.

    Args:
        target: a transformers model; one compiled by torch or wrapped by peft; or a diffusers
            pipeline, of whose components exactly one generates.

    Returns:
        That model, or `target` itself where it wraps nothing.

    Raises:
        UnsupportedModelError: a pipeline with no such component, or with several.
    """
    target = unwrap(target)
    parts = getattr(target, "components", None)
    is_ours = type(target).__module__.startswith("mmaccel.")  # takes a policy in its call
    if is_ours or not isinstance(parts, dict) or hasattr(type(target), "_sample"):
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
    """Raise OptionError unless an option is a bool; "no" would count as true."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}: expected True or False, received {value!r}; write True")
