"""Adaptive blocks: a block ends where the model, at the block's first pass, predicts a delimiter.

G. Lu et al., "AdaBlock-dLLM: Semantic-Aware Diffusion LLM Inference via Adaptive Block Size", ICLR
2026, arXiv 2509.26432, section 4.3, algorithm 1.

Departures: a delimiter counts where it is the likeliest token, whatever was drawn; only the block's
own slots are searched, so that a block has at most `block` of them (there a share of the whole
answer, which can be longer); the blocks of each row end at its own delimiters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import within
from mmaccel.contracts import Denoiser, Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.samplers.canvas.checks import check_model
from mmaccel.samplers.canvas.confident_parallel import Threshold
from mmaccel.samplers.canvas.policy import SelectorPolicy
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import Selector, SelectorState


@dataclass(frozen=True)
class AdaptiveBlock(SelectorPolicy):
    """Commits confident slots, in blocks that end where the model ends a step.

    Reference decoder: `Stepwise("confidence")` over the same blocks.

    Args:
        delimiters: tokens that end a step, such as a tokenizer's newline; without any, blocks are
            `block` slots.
        tau: probability a delimiter needs at a block's first pass.
        threshold: least probability of a slot's likeliest token, as in `ConfidentParallel`.
        block: most slots of a block; None lets them extend to the canvas's end.

    Loses: where no delimiter is known, as in images. Models with blocks of their own are refused;
    `block` divides the canvas.
    """

    delimiters: tuple[int, ...] = within((), hint="give the newline's id, as (198,)")
    tau: float = within(0.3, 0, 1, "0.3 to 0.5 is usual")
    threshold: float = within(0.9, 0, 1, "0.9 is usual")

    def selector(self, run: CanvasRun, state: SelectorState) -> Selector:
        return Threshold(self.threshold)

    def open(self, model: Denoiser, prompt: Prompt, length: int, **options: Any) -> CanvasRun:
        check_model(model)
        if self.delimiters and model.block is not None:
            raise UnsupportedModelError(
                "adaptive-block: expected a model that attends to everything, received one of "
                f"blocks of {model.block}; choose another policy"
            )
        if max(self.delimiters, default=0) >= model.vocab_size:
            raise OptionError(
                f"delimiters: expected ids below {model.vocab_size}, received "
                f"{self.delimiters}; take them from the model's tokenizer"
            )
        run = super().open(model, prompt, length, **options)
        run.canvas.blocks_are_adjacent = bool(self.delimiters)
        return run

    def narrow(
        self, run: CanvasRun, predictions: SlotPredictions, state: SelectorState
    ) -> SlotPredictions:
        """End blocks after their first pass's delimiter; the slots after it are not open now."""
        if not self.delimiters:
            return predictions
        canvas = run.canvas
        is_first = canvas.start != state.block_start
        canvas.shorten_block(torch.where(is_first, self.block_end(predictions), canvas.end))
        is_open = predictions.is_open & canvas.active().gather(1, predictions.slots)
        return replace(predictions, is_open=is_open)

    def block_end(self, predictions: SlotPredictions) -> Tensor:
        """`[B]` int64, the slot after the likeliest delimiter, or the largest int64 without one."""
        delimiters = list(self.delimiters)
        probability = predictions.logits.softmax(-1)[..., delimiters]  # [B, Q, D]
        highest = predictions.logits.amax(-1, keepdim=True)
        is_likeliest = predictions.logits[..., delimiters] == highest
        is_end = predictions.is_open[..., None] & is_likeliest
        best, index = torch.where(is_end, probability, -1.0).amax(-1).max(1)
        slot = predictions.slots.gather(1, index[:, None])[:, 0]
        return torch.where(best > self.tau, slot + 1, torch.iinfo(torch.int64).max)
