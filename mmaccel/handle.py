"""`attach`: lets a policy decode what a model generates, until `detach`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmaccel.catalog import policy_names
from mmaccel.checks import check_choice
from mmaccel.contracts import Layout
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.attach.attaching import attach_policy, find_served
from mmaccel.pipelines.hosts.attach.generate import AttachOptions
from mmaccel.pipelines.hosts.attach.handle import Handle
from mmaccel.pipelines.hosts.attach.layer_methods import read_methods
from mmaccel.pipelines.hosts.attach.patching import find_owner
from mmaccel.pipelines.hosts.attach.registry import find_pipeline, pipeline_policies
from mmaccel.pipelines.hosts.attach.unwrap import find_generator, unwrap
from mmaccel.pipelines.hosts.runner.engine import (
    Engine,
    UseCompile,
    UseFused,
    UseGraphs,
    UseSharing,
)
from mmaccel.pipelines.hosts.transformers_release import warn_if_untested
from mmaccel.pipelines.hosts.vision_language.reduction import VisualReduction
from mmaccel.policies import Policy
from mmaccel.reduction.kv_cache.contract import KVCacheMethod
from mmaccel.reduction.sparse_attention.contract import AttentionMethod
from mmaccel.reduction.visual_tokens.contract import (
    UsePromptReducer,
    UseReducers,
    read_prompt_reducer,
    read_reducers,
)
from mmaccel.samplers.noise import check_seed, choose_seed


@dataclass(frozen=True)
class Support:
    """Whether policies can be attached to an object; its truth value is `supported`. `policies` are
    short names of those that can be. Single calls may still fall back, as their statistics say.
    """

    supported: bool
    family: str | None
    reason: str
    policies: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.supported


def attach(
    target: Any,
    policy: Policy | str | Mapping[str, Any],
    *,
    seed: int | Sequence[int | None] | None = None,
    strict: bool = False,
    layout: Layout | None = None,
    cuda_graphs: UseGraphs = "auto",
    sync_every: int = 1,
    fused: UseFused = "auto",
    compile: UseCompile = "auto",
    prefill_chunk_size: int | None = None,
    share_prefix: UseSharing = False,
    assume_stateless: bool = False,
    visual_tokens: UseReducers = None,
    prompt_tokens: UsePromptReducer = None,
    kv_cache: KVCacheMethod | str | Mapping[str, Any] | None = None,
    attention: AttentionMethod | str | Mapping[str, Any] | None = None,
) -> Handle:
    """Let a policy decode what a model generates, until it is detached.

    It stays attached for the life of the model, whether or not the handle is kept, unless the
    handle's `with` block ends, or `handle.detach()` or `mmaccel.detach(target)` is called.
    `target.generate(...)` keeps its signature. Sampling arguments, transformers' own processors,
    stopping criteria, padded batches, guidance and streamer work as before; greedy output is the
    same up to rounding, sampled output has the same distribution. Scores, hidden states and caches
    are returned as without a policy. Only this object is changed.

    Args:
        target: a transformers model that generates, also one compiled by torch or wrapped by peft;
            a speech model whose depth decoder makes frames (CSM, Moshi, Qwen3-Omni), or that makes
            codes of several books a step (MusicGen, Dia, Higgs Audio v2); a pipeline of
            transformers or diffusers around one; a pipeline or model listed in
            `mmaccel.pipelines.hosts.attach.registry`; or a `Denoiser`, or a model of a family in
            `mmaccel.pipelines.hosts.diffusion_lm.registry`, which then has `generate`.
        policy: a policy, its short name (`mmaccel models` lists them), or a dictionary of a name
            and fields, such as `{"name": "jacobi", "window": 32}`; so are the four methods below.
        seed: one for all rows (row b is item b of it), or one per row; the same at every call, but
            for those that make the frames of one utterance. None draws one from torch's global
            generator at every sampled call, so that `torch.manual_seed` makes it reproducible.
        strict: raise where a call cannot be served. Otherwise it runs as without a policy, with a
            warning and the reason in `stats.fallbacks`.
        layout: what is known about the tokens of every call, slot by slot, such as
            `mmaccel.Frames`. Other tokens are masked before temperature and truncation, as by
            `prefix_allowed_tokens_fn`; calls that fall back are masked or refused.
        cuda_graphs, sync_every, compile: see `mmaccel.pipelines.hosts.runner.engine.Engine`.
        fused: likewise. The fused decoder packs weights in place: with the first call, or here
            where it is asked for, the model's parameters become views of larger tensors, until
            `detach`. Its logits differ from those of the model's own forward in their last bits;
            `stats.route` says which of the two ran.
        prefill_chunk_size: tokens of prompts that a pass processes at most, which bounds the memory
            of long prompts; None: whole ones. `generate(prefill_chunk_size=…)` sets it for a call.
        share_prefix: True, "auto" or False: whether rows of a call that have the same prompt
            (`num_return_sequences`, the unconditional rows of guidance) store and read it once.
            Logits are the same up to rounding.
        assume_stateless: whether every logits processor and `prefix_allowed_tokens_fn` of your own
            counts as marked by `mmaccel.stateless`. Otherwise a `generate` under a window policy
            with an unmarked one cannot be served.
        visual_tokens: which visual tokens of a prompt stay, such as `mmaccel.DivPrune(keep=0.22)`,
            or a list of methods of different stages. With it, and with the next two, the policy is
            as exact as it says with respect to the model on what stays.
        prompt_tokens: which words of a prompt are computed, such as `mmaccel.LazyLLM(keep=0.5)`.
        kv_cache: which entries stay in the layers' caches, such as `mmaccel.SnapKV(budget=1024)`.
        attention: which cached keys a pass attends to, such as `mmaccel.Quest(budget=0.1)`. That
            depends on its window, so that every policy is relaxed under it.

    Raises:
        OptionError: arguments that do not go together, or with this model.
        MissingBackendError: no device or compiler for what was asked for.
        UnsupportedModelError: the target does not generate with transformers, or lacks what a
            method or a switch needs; with `strict`, also a model that only the original can serve.
        AttachError: the target has a policy already. With `strict`, `generate` raises it too.
    """
    warn_if_untested()
    check_choice("strict", strict, (True, False))
    check_choice("assume_stateless", assume_stateless, (True, False))
    engine = Engine(
        cuda_graphs,
        sync_every,
        fused,
        compile,
        prefill_chunk_size=prefill_chunk_size,
        share_prefix=share_prefix,
    )
    options = AttachOptions(
        seed=None if check_seed(seed) is None else choose_seed(seed),
        strict=strict,
        layout=layout,
        engine=engine,
        assume_stateless=assume_stateless,
        reduction=VisualReduction(read_reducers(visual_tokens), read_prompt_reducer(prompt_tokens)),
        layer_methods=read_methods(kv_cache, attention),
    )
    return attach_policy(target, policy, options)


def detach(target: Any) -> bool:
    """Detach the policy of a model or pipeline, with or without its handle at hand; whether there
    was one.

    Raises:
        AttachError: other code changed the model's class since.
        BusyError: this thread is inside a call, in a callback or a stopping criterion.
    """
    owner = find_owner(unwrap(target)) or find_owner(find_generator(target))
    if owner is None:
        return False
    owner.detach()
    return True


def supports(target: Any) -> Support:
    """Whether a policy attached to an object would decode for it, with the reason where not, as
    `attach` decides; else calls run the original, or raise with `strict=True`. The first call for a
    model runs a short self-check.
    """
    try:
        pipeline_family = find_pipeline(target)
        if pipeline_family:
            return Support(True, pipeline_family, "", pipeline_policies(target))
        _, family, refusal = find_served(target)
    except (OptionError, UnsupportedModelError) as error:
        return Support(False, None, str(error))
    if refusal is not None:
        return Support(False, None, str(refusal))
    return Support(True, family.name, "", tuple(policy_names()))
