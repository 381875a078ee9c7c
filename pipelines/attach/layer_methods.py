"""Which models, calls and combinations the methods of a model's layers can serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmaccel.contracts import Policy
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.causal_lm.self_check import find_layer_obstacle
from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.samplers.trees.contract import has_tree


def check_model(slots: str, window: CausalLMWindow) -> None:
    """Refuse a model whose layers cannot carry methods, or trees.

    Args:
        slots: the keywords that ask for it.
        window: over the model.

    Raises:
        UnsupportedModelError: with the layer and why.

    Cost: at a model's first time, a self-check of a few short passes.
    """
    name = type(window.model).__name__
    for layer, span in enumerate(window.facts.windows):
        if span is not None:
            raise UnsupportedModelError(
                f"{slots}: expected layers that see all positions, received a {name} "
                f"whose layer {layer} sees the last {span} alone; leave {slots} out"
            )
    reason = find_layer_obstacle(window)
    if reason:
        raise UnsupportedModelError(
            f"{slots}: expected layers whose attention transformers looks up by name, "
            f"received a {name}: {reason}; leave {slots} out"
        )


def check_combination(
    methods: LayerMethods, reducers: Sequence[TokenReducer], policy: Policy
) -> None:
    """Refuse methods that cannot be combined.

    Raises:
        OptionError: sparse attention beside a tree.
        UnsupportedModelError: eviction beside a reducer inside the language model.
    """
    if methods.attention is not None and has_tree(policy):
        raise OptionError(
            f"attention: expected a policy that verifies a chain beside {methods.attention!r}, "
            f"received {policy!r}; leave tree or attention out"
        )
    inside = next((method for method in reducers if method.stage == "llm_layer"), None)
    if methods.kv_cache is not None and inside is not None:
        raise UnsupportedModelError(
            f"kv_cache: expected visual tokens that leave before the first layer, received "
            f"{inside!r}, which drops them inside the language model; take a method at the "
            "encoder's exit, such as DivPrune, or leave kv_cache out"
        )


def find_obstacles(methods: LayerMethods, call: GenerateCall) -> Iterator[str]:
    """Reasons why a call cannot be decoded under methods."""
    if "attentions" in call.records:
        yield f"{methods.slots} with attentions of all tokens"
    if methods.kv_cache is None:
        return
    if call.n_cached:
        yield "kv_cache with a cache given by the caller"
    if call.returns_cache:
        yield "kv_cache with a cache that the caller sees"
    if call.config.prefill_chunk_size is not None:
        yield "kv_cache with a prefill in chunks"
