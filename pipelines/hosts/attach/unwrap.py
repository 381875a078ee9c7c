"""Finds the model in a target of `attach`: compiled, wrapped, or part of a pipeline."""

from __future__ import annotations

from typing import Any

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.compatibility import find_remedy
from mmaccel.pipelines.hosts.depth.holders import HOLDERS, PACKAGES

GENERATORS = {"GlmImagePipeline": "vision_language_encoder"}
"""diffusers' pipelines whose pictures are made of tokens, and the component that makes these."""

_BASE = "DiffusionPipeline"  # a caller's own pipeline has no other class of diffusers


def unwrap(target: Any) -> Any:
    """The model that torch compiled, peft wrapped or a pipeline of transformers holds."""
    if is_pipeline(target, "transformers.pipelines"):
        target = target.model
    while hasattr(target, "_orig_mod"):
        target = target._orig_mod
    if hasattr(target, "peft_config") and hasattr(target, "get_base_model"):
        target = target.get_base_model()
    return target


def find_generator(target: Any) -> Any:
    """The part of `target` whose `generate` is served: the depth decoder of a speech model in
    `HOLDERS`, the component of a diffusers pipeline in `GENERATORS`, the one component that
    generates of a caller's own pipeline, else `target` itself.
    """
    target = unwrap(target)
    if is_holder(target):
        return _find_decoder(target)
    components = getattr(target, "components", None)
    is_ours = type(target).__module__.startswith("mmaccel.")  # takes a policy in its call
    if is_ours or not isinstance(components, dict) or hasattr(type(target), "_sample"):
        return target
    generating = {
        name: component
        for name, component in components.items()
        if hasattr(type(component), "_sample")
    }
    if is_pipeline(target, "diffusers") or not generating:
        return find_generator(components[_find_component(target, components)])
    if len(generating) > 1:
        names = ", ".join(generating)
        raise UnsupportedModelError(
            f"attach: expected a pipeline with one component that generates, received a "
            f"{type(target).__name__} with {names}; attach to the component itself"
        )
    return find_generator(next(iter(generating.values())))


def is_holder(target: Any) -> bool:
    """Whether an object is a model in `HOLDERS`, whose `generate` calls that of a part of it."""
    cls = type(target)
    return cls.__name__ in HOLDERS and cls.__module__.startswith(PACKAGES)


def _find_decoder(target: Any) -> Any:
    """The depth decoder of a model in `HOLDERS`, which may be loaded without it."""
    path = HOLDERS[type(target).__name__]
    try:
        return target.get_submodule(path)
    except AttributeError:
        raise UnsupportedModelError(
            f"attach: expected a {type(target).__name__} with {path}, received one without; load "
            "it whole, or attach to the part that generates"
        ) from None


def is_pipeline(target: Any, module: str) -> bool:
    """Whether an object's class is a pipeline of a library's module, or a child of one."""
    for cls in type(target).__mro__:
        is_of_module = cls.__module__.startswith(module) and cls.__name__ != _BASE
        if is_of_module and cls.__name__.endswith("Pipeline"):
            return True
    return False


def _find_component(pipe: Any, components: dict[str, Any]) -> str:
    names = [GENERATORS[k.__name__] for k in type(pipe).__mro__ if k.__name__ in GENERATORS]
    if names:
        return names[0]
    cached = [component for component in components.values() if hasattr(component, "enable_cache")]
    raise UnsupportedModelError(
        "attach: expected a pipeline that generates tokens (GlmImagePipeline, AmusedPipeline, "
        f"LLaDA2Pipeline, DiffusionGemmaPipeline), received a {type(pipe).__name__}, none of "
        f"whose passes a policy can save; {find_remedy(cached[0] if cached else pipe)}"
    )
