"""What `mmaccel.attach` does: find the model in its target, ask what goes with what, and patch it,
so that transformers finds `GenerateService.sample` as its decoding loop.
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
    """Let a policy decode what a target generates; takes what `mmaccel.attach` was given."""
    if find_pipeline(target):
        return _attach_to_pipeline(target, policy, options)
    model, family, refusal = find_served(target)  # runs the model's self-check
    policy = choose_policy(policy, options.layout, family.layout(model))
    engine = options.engine
    engine.check(find_device(model), policy)
    if refusal is not None and options.strict:
        raise refusal
    window = family.wrap(model) if refusal is None else None
    check_layout(options.layout, count_ids(model) or getattr(window, "vocab_size", None))

    # every part says what it needs of the others
    reduction = options.reduction
    vision = VisionModel(model, family, reduction) if reduction else None
    refuse(explain(policy, options.layer_methods, *reduction.parts, engine, window, vision))

    # the handle exchanges the model's class: its `generate` decodes by the policy now
    handle = Handle(model, GenerateService(policy, family, options, target, model))
    if engine.needs_fused and find_training_effect(model) is None:  # else at the first call
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
    service = open_service(target)
    service.serve(read_canvas_policy(policy), options)
    return Handle(target, service)


def find_served(target: Any) -> tuple[Any, CausalLM, UnsupportedModelError | None]:
    """The model in a target of `attach`, its family, and why no call of it can be served; runs its
    self-check. Calls ask the family again: those of a model in training mode run the original.
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
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    family: CausalLM = load(find_family(model_type))()
    return family


def choose_policy(policy: Any, layout: Any, family_layout: Layout | None = None) -> Policy:
    """The policy that a caller named or gave, checked with its drafts' layout."""
    policy = read_policy(policy)
    check_policy(policy)
    check_layout(layout)
    source = source_of(policy)
    if source is not None:
        source.check_layout(family_layout if layout is None else layout)
    return policy
