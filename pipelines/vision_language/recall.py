"""Methods that restart: a first run up to one layer says on which visual tokens the model then runs
from its first layer on.

The first run has all columns, stops in front of the method's layer, and leaves nothing: no cache,
no logits. What the method does not choose then leaves the prompt as at the exit of the encoder: its
columns go, the others have the positions they had.

Source: M. Liang et al., "ILRe" (arXiv:2508.17892), section 3; the method is in
`mmaccel.reduction.visual_tokens.ilre`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.transformers_release import CACHE
from mmaccel.pipelines.vision_language.layer_attention import (
    ChosenColumns,
    LayerAttention,
    noting,
)
from mmaccel.pipelines.vision_language.visuals import find_columns
from mmaccel.reduction.visual_tokens import budgets
from mmaccel.reduction.visual_tokens.contract import TokenReducer

OFFERED = frozenset({"keys", "last_attention", "text_attention", "text", "restart"})


@dataclass(frozen=True)
class Recall:
    """What a first run chose.

    Attributes:
        layer: in front of which it stopped.
        stays: `[B, T]` bool, columns of the prompt.
        is_visual: `[B, T]` bool, those that were visual tokens.
        before, after: visual tokens of all rows.
        n_processed: tokens that the run processed.
        seconds: that it took.
    """

    layer: int
    stays: Tensor
    is_visual: Tensor
    before: int
    after: int
    n_processed: int
    seconds: float

    def kept(self) -> list[Tensor]:
        """Which visual tokens of each row stay: `[n]` bool, in their order."""
        pairs = zip(self.stays, self.is_visual, strict=True)
        return [stays[own].cpu() for stays, own in pairs]


def recall(call: GenerateCall, method: TokenReducer, seeds: Sequence[int]) -> Recall | None:
    """Run a prompt up to a method's layer, and choose; None where all visual tokens stay.

    Args:
        call: the call.
        method: one that restarts.
        seeds: of its rows, for methods that draw.

    Cost: a pass of the prompt through the layers before the method's.
    """
    began = time.perf_counter()
    mask, is_visual = find_columns(call)
    counts = is_visual.sum(1)
    if bool((budgets.uniform(counts, method.keep, method.n_keep) >= counts).all()):
        return None
    layers = call.model.get_decoder().layers
    (index,) = method.layers_in(len(layers))
    visual = ChosenColumns.of(is_visual)
    with noting(call.model, method, [index]) as noted:
        hidden = _run_up_to(call, layers[index])
        attention = LayerAttention(noted, visual, mask & ~is_visual, index)
        context = attention.open_context(
            visual.take(hidden),
            hidden,
            seed=torch.tensor([seed % 2**63 for seed in seeds], device=mask.device),
            depth=len(layers),
            offers=("restart",),
        )
        plan = method.plan(context)
    stays = visual.mark(mask & ~is_visual, plan)
    after = int(plan.counts.sum())
    seconds = time.perf_counter() - began
    return Recall(index, stays, is_visual, int(counts.sum()), after, mask.numel(), seconds)


class _ReachedError(Exception):
    """Ends a pass in front of a layer."""


def _run_up_to(call: GenerateCall, layer: Any) -> Tensor:
    """The states `[B, T, D]` that a layer would receive in the prompt's pass."""
    reached: list[Tensor] = []

    def stop(_layer: Any, args: tuple[Any, ...], _given: dict[str, Any]) -> None:
        reached.append(args[0])
        raise _ReachedError

    others = {**call.others, CACHE: None, "use_cache": False}
    others.pop("tokenizer", None)  # stopping criteria have it
    handle = layer.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        call.model._prefill(call.ids, call.config, others)
    except _ReachedError:
        pass
    finally:
        handle.remove()
    (hidden,) = reached
    return hidden
