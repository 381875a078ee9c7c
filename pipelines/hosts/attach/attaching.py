"""What `attach` does: finds the model and its family, checks them, patches, hands back the handle.

From here a call's way is that of `pipelines.hosts.attach.generate`: `GenerateService.methods` are
what a model gets, and its `sample` is the loop that decodes.
"""

from __future__ import annotations

from typing import Any

from mmaccel.capabilities import explain, refuse
from mmaccel.catalog import find_family, load, read_policy
from mmaccel.contracts import Layout
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.attach.generate import AttachOptions, GenerateService
from mmaccel.pipelines.hosts.attach.handle import Handle
from mmaccel.pipelines.hosts.attach.layout_processor import check_layout, count_ids
from mmaccel.pipelines.hosts.attach.registry import find_pipeline, open_service, read_canvas_policy
from mmaccel.pipelines.hosts.attach.unwrap import find_generator
from mmaccel.pipelines.hosts.causal_lm.compatibility import (
    find_device,
    find_remedy,
    find_training_effect,
)
from mmaccel.pipelines.hosts.causal_lm.family import CausalLM
from mmaccel.pipelines.hosts.vision_language.reduction import VisionModel
from mmaccel.policies import Policy, check_policy
from mmaccel.samplers.drafting.sources import source_of


def attach_policy(target: Any, policy: Any, options: AttachOptions) -> Handle:
    """Let a policy decode what a target generates; see `mmaccel.attach`."""
    if find_pipeline(target):
        return _attach_to_pipeline(target, policy, options)
    model, family, refusal = find_served(target)  # runs the model's self-check
    chosen = choose_policy(policy, options.layout, family.layout(model))
    engine = options.engine
    engine.check(find_device(model), chosen)
    if options.strict and refusal is not None:
        raise refusal
    window = family.wrap(model) if refusal is None else None
    n_ids = count_ids(model) or getattr(window, "vocab_size", None)
    check_layout(options.layout, n_ids)
    reduction = options.reduction
    vision = VisionModel(model, family, reduction) if reduction else None
    refuse(explain(chosen, options.layer_methods, *reduction.parts, engine, window, vision))
    handle = Handle(model, GenerateService(chosen, family, options, target, model))  # patches
    if engine.needs_fused and find_training_effect(model) is None:  # else at its first call
        try:
            window = family.wrap(model)
            engine.use_fused(window)
            window.choose_route()  # packs the weights
        except BaseException:
            handle.detach()
            raise
    return handle


def _attach_to_pipeline(target: Any, policy: Any, options: AttachOptions) -> Handle:
    """A pipeline or a denoiser, which fills a canvas by a loop of its own."""
    if options.reduction:
        slot = "visual_tokens" if options.reduction.methods else "prompt_tokens"
        raise UnsupportedModelError(
            f"{slot}: expected a language model of transformers, received a "
            f"{type(target).__name__}; leave {slot} out"
        )
    chosen = read_canvas_policy(policy)
    service = open_service(target)
    service.serve(chosen, options)
    return Handle(target, service)


def find_served(target: Any) -> tuple[Any, CausalLM, UnsupportedModelError | None]:
    """The model in a target of `attach`, its family, and why no call of it can be served.

    Every call asks the family again. A model in training mode whose passes differ from those in
    evaluation mode can be served: its calls run the original until `eval()`.

    Raises:
        UnsupportedModelError: the target does not generate with transformers.
    """
    model = find_generator(target)
    if not hasattr(type(model), "_sample"):
        raise UnsupportedModelError(
            "attach: expected a transformers model that generates, received a "
            f"{type(model).__name__}; {find_remedy(model)}"
        )
    family = family_of(model)
    try:
        family.check(model)
    except UnsupportedModelError as error:
        return model, family, error
    return model, family, None


def family_of(model: Any) -> CausalLM:
    """The family a model belongs to, by the `model_type` of its configuration."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    family: CausalLM = load(find_family(kind))()
    return family


def choose_policy(policy: Any, layout: Any, own: Layout | None = None) -> Policy:
    """The policy that `mmaccel.catalog.read_policy` finds, checked.

    Args:
        policy, layout: as `attach` takes them.
        own: the layout of the model's family.

    Raises:
        OptionError: no policy, an object that is no layout, or drafts that need another one.
    """
    policy = read_policy(policy)
    check_policy(policy)
    check_layout(layout)
    source = source_of(policy)
    if source is not None:
        source.check_layout(own if layout is None else layout)
    return policy
