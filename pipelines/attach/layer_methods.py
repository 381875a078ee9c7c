"""Which models, calls and combinations the methods of a model's layers can serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mmaccel.catalog import read_method
from mmaccel.contracts import Model, Policy, TokenModel, check_method
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.pipelines.runner.engine import Engine, refuse_sharing
from mmaccel.reduction.kv_cache.contract import KVCacheMethod
from mmaccel.reduction.sparse_attention.contract import AttentionMethod
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.samplers.canvas.cache_plan import as_plan
from mmaccel.samplers.trees.contract import has_tree

_CONTRACTS: dict[str, tuple[type, str]] = {  # slot -> base of its methods, an example
    "kv_cache": (KVCacheMethod, "mmaccel.SnapKV(budget=1024)"),
    "attention": (AttentionMethod, "mmaccel.Quest(budget=0.1)"),
}


def read_methods(kv_cache: Any, attention: Any) -> LayerMethods:
    """The methods that a caller gave, as `mmaccel.attach` takes them.

    Raises:
        OptionError: something that is no method of its keyword.
    """
    return LayerMethods(_read("kv_cache", kv_cache), _read("attention", attention))


def _read(slot: str, given: Any) -> Any:
    if given is None:
        return None
    base, example = _CONTRACTS[slot]
    return check_method(slot, read_method(slot, given), base, example)


def check_model(slots: str, model: Model, methods: LayerMethods) -> None:
    """Refuse a model whose layers do not carry methods, or trees.

    Args:
        slots: the keywords that ask for it.
        model: decodes.
        methods: of its layers.

    Raises:
        UnsupportedModelError: with the layer and why.

    Cost: that of `Model.find_layer_obstacle`.
    """
    name = type(model if model.model is None else model.model).__name__
    refuse_layers(slots, name, model.find_layer_obstacle(methods))


def refuse_layers(slots: str, name: str, reason: str) -> None:
    """Raise UnsupportedModelError where there is a reason; `name` is the model's class."""
    if reason:
        raise UnsupportedModelError(
            f"{slots}: expected layers whose cache and attention can be chosen, received a {name}: "
            f"{reason}; leave {slots} out"
        )


def check_combination(
    methods: LayerMethods, reducers: Sequence[TokenReducer], policy: Policy
) -> None:
    """Refuse methods that cannot be combined.

    Raises:
        OptionError: sparse attention beside a tree, or beside heads that hold different numbers of
            entries; a choice that layers share beside eviction; a policy that keeps no finished
            blocks of a canvas; a cache that changes while tokens are generated beside a tree,
            sparse attention or a wider window.
        UnsupportedModelError: eviction beside a reducer inside the language model.
    """
    if methods.attention is not None and has_tree(policy):
        raise OptionError(
            f"attention: expected a policy that verifies a chain beside {methods.attention!r}, "
            f"received {policy!r}; leave tree or attention out"
        )
    if methods.goes_on:
        _check_changes(methods, policy)
    is_canvas = getattr(policy, "kind", "window") == "canvas"
    if methods and is_canvas and as_plan(getattr(policy, "cache", "none")).kind != "block":
        raise OptionError(
            f"{methods.slots}: expected a policy that keeps finished blocks, received {policy!r}; "
            f'give it cache="block", or leave {methods.slots} out'
        )
    if methods.is_headwise and methods.attention is not None:
        raise OptionError(
            f"attention: expected None beside {methods.kv_cache!r}, after which heads hold "
            f"different numbers of entries, received {methods.attention!r}; take SnapKV, or leave "
            "kv_cache or attention out"
        )
    if methods.kv_cache is not None and methods.attention is not None:
        if methods.attention.shares_layers:
            raise OptionError(
                f"attention: expected a selector that chooses in every layer beside "
                f"{methods.kv_cache!r}, after which layers hold different entries, received "
                f"{methods.attention!r}; take Quest, or leave kv_cache out"
            )
    inside = next((method for method in reducers if method.stage == "llm_layer"), None)
    if methods.kv_cache is not None and inside is not None:
        raise UnsupportedModelError(
            f"kv_cache: expected visual tokens that leave before the first layer, received "
            f"{inside!r}, which drops them inside the language model; take a method at the "
            "encoder's exit, such as DivPrune, or leave kv_cache out"
        )


def check_chunks(methods: LayerMethods, prefill_chunk_size: int | None) -> None:
    """Refuse prompts in chunks beside methods that look at a whole prompt in its pass.

    Raises:
        OptionError: a selector for prompts, or a method that processes a prompt twice.
    """
    reason = _find_whole_prompts(methods)
    if prefill_chunk_size is not None and reason:
        raise OptionError(
            f"prefill_chunk_size: expected methods that need no whole prompt in a pass, received "
            f"{reason}; leave prefill_chunk_size or the method out"
        )


def _find_whole_prompts(methods: LayerMethods) -> str:
    """What looks at a whole prompt in its pass; empty where nothing does."""
    if methods.attention is not None and methods.attention.chooses_prompts:
        return f"attention={methods.attention!r}, which chooses for all queries of the prompt"
    if methods.repeated:
        return f"kv_cache={methods.kv_cache!r}, which processes the prompt twice"
    return ""


def _check_changes(methods: LayerMethods, policy: Policy) -> None:
    """Raise OptionError unless the cache may change while a policy generates tokens."""
    quantizer = methods.quantizer
    if quantizer is not None:
        name = repr(quantizer)
        field = quantizer.name
        widest = quantizer.widest
        larger = "group and residual"
    else:
        evicting = methods.evictor
        assert evicting is not None and evicting.every is not None
        name = f"{evicting.name}(every={evicting.every})"
        field = "every"
        widest = evicting.every
        larger = "every"
    window = getattr(policy, "window", 1)
    expected = ""
    if has_tree(policy):
        expected = f"a policy that verifies a chain, received {policy!r}; leave tree or {field} out"
    elif methods.attention is not None:
        expected = f"no attention, received {methods.attention!r}; leave attention or {field} out"
    elif not isinstance(window, int):
        expected = f"a fixed window, received {policy!r}; give it a number up to {widest}"
    elif window > widest:
        expected = (
            f"a window of at most {widest}, received {policy!r}; give a larger {larger} or a "
            "narrower window"
        )
    if expected:
        raise OptionError(f"kv_cache: beside {name}, expected {expected}")


def check_sharing(engine: Engine, methods: LayerMethods, model: Model) -> None:
    """Refuse `share_prefix=True` beside methods of layers, and for a model that cannot share.

    Raises:
        OptionError: such methods.
        UnsupportedModelError: such a model.

    Cost: that of `TokenModel.find_sharing_obstacle`.
    """
    if engine.share_prefix is not True:
        return
    if methods:
        raise OptionError(
            f"share_prefix=True: expected rows that keep and read all entries of their prompt, "
            f"received {methods.slots}, by which each row chooses its own; leave one of them out"
        )
    if not isinstance(model, TokenModel):
        refuse_sharing(f"a {type(model).__name__}, whose canvas is filled pass by pass")
    elif reason := model.find_sharing_obstacle():
        refuse_sharing(f"a {type(model).__name__}: {reason}")


def find_obstacles(methods: LayerMethods, call: GenerateCall) -> Iterator[str]:
    """Reasons why a call cannot be decoded under methods."""
    if methods and "attentions" in call.records:
        yield f"{methods.slots} with attentions of all tokens"
    has_chunks = call.config.prefill_chunk_size is not None
    if has_chunks and _find_whole_prompts(methods):
        yield "a method that needs the whole prompt with a prefill in chunks"
    if methods.kv_cache is None:
        return
    if methods.repeated and call.prompt_reasons:
        yield f"{methods.kv_cache!r} with a prompt of more than tokens"
    if call.n_cached:
        yield "kv_cache with a cache given by the caller"
    if call.returns_cache:
        yield "kv_cache with a cache that the caller sees"
    if has_chunks and call.prompt_reasons:
        yield "kv_cache with a prefill in chunks by the model itself"
