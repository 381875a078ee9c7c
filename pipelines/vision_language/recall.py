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

from torch import Tensor

from mmaccel.pipelines.attach.generate_call import GenerateCall
from mmaccel.pipelines.transformers_release import CACHE
from mmaccel.pipelines.vision_language.columns import ChosenColumns
from mmaccel.pipelines.vision_language.layers import DecoderLayers, LayerAnswer, PassEndedError
from mmaccel.pipelines.vision_language.visuals import find_columns
from mmaccel.reduction.visual_tokens import budgets
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import Plan

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
    layers, run = DecoderLayers(call, method, seeds), FirstRun()
    others = {**call.others, CACHE: None, "use_cache": False}
    others.pop("tokenizer", None)  # stopping criteria have it
    with layers.passing(run):
        call.model._prefill(call.ids, call.config, others)
    assert run.plan is not None
    stays = ChosenColumns.of(is_visual).mark(mask & ~is_visual, run.plan)
    after = int(run.plan.counts.sum())
    seconds = time.perf_counter() - began
    return Recall(
        layers.before[0], stays, is_visual, int(counts.sum()), after, mask.numel(), seconds
    )


class FirstRun(LayerAnswer):
    """A pass that ends in front of the method's layer.

    Attributes:
        plan: of the visual tokens there; None before.
    """

    plan: Plan | None = None

    def choose(
        self, layers: DecoderLayers, index: int, hidden: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """Choose, and end the pass."""
        visual = ChosenColumns.of(layers.is_visual)
        is_text = layers.mask & ~layers.is_visual
        self.plan = layers.plan(index, visual, is_text, visual.take(hidden), hidden)
        raise PassEndedError
