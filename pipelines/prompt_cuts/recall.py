"""Methods that restart: a first run up to one layer says on which tokens the model then runs from
its first layer on.

The first run has all columns, stops in front of the method's layer, and leaves nothing: no cache,
no logits. What the method does not choose then leaves the prompt: its columns go, the others have
the positions they had.

Source: M. Liang et al., "ILRe" (arXiv:2508.17892), section 3; the method is in
`mmaccel.reduction.visual_tokens.ilre`.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from mmaccel.pipelines.generate_call import GenerateCall
from mmaccel.pipelines.prompt_cuts.columns import ChosenColumns, split_rows
from mmaccel.pipelines.prompt_cuts.layers import DecoderLayers, LayerAnswer, PassEndedError
from mmaccel.pipelines.transformers_release import CACHE
from mmaccel.results import Stats


class FirstRun(LayerAnswer):
    """A pass over a prompt that ends in front of the method's layer.

    Args:
        layers: of the call.

    Attributes:
        stays: `[B, T]` bool, the columns of the second run.
        seconds: that it took.
    """

    def __init__(self, layers: DecoderLayers) -> None:
        self.layers = layers
        self.stays = layers.mask
        self.seconds = 0.0

    def run(self, call: GenerateCall) -> None:
        """Choose. Cost: a pass of the prompt through the layers before the method's."""
        began = time.perf_counter()
        others = {**call.others, CACHE: None, "use_cache": False}
        others.pop("tokenizer", None)  # stopping criteria have it
        with self.layers.passing(self):
            call.model._prefill(call.ids, call.whole_config, others)
        self.seconds = time.perf_counter() - began

    def choose(
        self, layers: DecoderLayers, index: int, hidden: Tensor, given: dict[str, Any]
    ) -> Tensor:
        """Choose columns, and end the pass."""
        leaving = ChosenColumns.of(layers.may_leave)
        others = layers.mask & ~layers.may_leave
        plan = layers.plan(index, leaving, others, leaving.take(hidden), hidden)
        self.stays = leaving.mark(others, plan)
        raise PassEndedError

    def kept(self) -> list[Tensor]:
        """Which tokens that may leave stay in each row: `[n]` bool, in their order."""
        return split_rows(self.stays, self.layers.may_leave)

    def describe(self) -> str:
        """How many stay."""
        before = int(self.layers.n_leaving.sum())
        after = int((self.stays & self.layers.may_leave).sum())
        counts = f"{after} of {before} {self.layers.leaving.noun}"
        return f"{counts} recalled in front of layer {self.layers.before[0]}"

    def record(self, stats: Stats) -> None:
        """Add this pass to the statistics of the call."""
        stats.prefill_passes += 1
        stats.tokens_processed += self.layers.mask.numel()
        stats.seconds += self.seconds
        stats.forward_seconds += self.seconds
