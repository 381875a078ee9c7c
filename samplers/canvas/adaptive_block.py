"""Adaptive blocks: a block ends where the model, at its first look, puts an end of a step.

G. Lu et al., "AdaBlock-dLLM: Semantic-Aware Diffusion LLM Inference via Adaptive Block Size", ICLR
2026, arXiv 2509.26432, section 4.3, algorithm 1.

Departures: a delimiter counts where it is the likeliest token, whatever was drawn; it is looked for
in the block's own slots, so that a block has at most `block` of them (there in a share of the whole
answer, which can be longer than the default block); the blocks of each row end where its own
delimiters stand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import Denoiser
from mmaccel.checks import check_number
from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.results import Generation
from mmaccel.samplers.canvas.checks import check_model
from mmaccel.samplers.canvas.confident_parallel import Threshold
from mmaccel.samplers.canvas.policy import SelectorPolicy
from mmaccel.samplers.canvas.predictions import SlotPredictions
from mmaccel.samplers.canvas.run import CanvasRun
from mmaccel.samplers.canvas.selector import AtLeast, Selector, SelectorState


@dataclass(frozen=True)
class AdaptiveBlock(SelectorPolicy):
    """Reference decoder: `Stepwise("confidence")` over the same blocks.

    Args:
        delimiters: tokens that end a step, such as a tokenizer's newline; without any, blocks are
            `block` slots.
        tau: probability a delimiter needs at a block's first pass.
        threshold: least probability of a slot's likeliest token, as in `ConfidentParallel`.
        block: most slots of a block; None lets them run to the canvas's end.
        cache: as in `Stepwise`.
    """

    delimiters: tuple[int, ...] = ()
    tau: float = 0.3
    threshold: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.delimiters
        if not isinstance(given, tuple | list) or not all(
            isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in given
        ):
            raise OptionError(
                f"delimiters: expected token ids, received {given!r}; give the newline's, as (198,)"
            )
        object.__setattr__(self, "delimiters", tuple(given))
        check_number("tau", self.tau, 0, 1, "0.3 to 0.5 is usual")
        Threshold(self.threshold)

    def open(self, model: Denoiser, prompt: Prompt, length: int, **options: Any) -> CanvasRun:
        """A run of this policy, before its first pass.

        Raises:
            OptionError: a delimiter that is no token of the model.
            UnsupportedModelError: a model whose own blocks cannot be moved.
        """
        check_model(model)
        if self.delimiters and model.block is not None:
            raise UnsupportedModelError(
                "adaptive-block: expected a model that looks at everything, received one of blocks "
                f"of {model.block}; choose another policy"
            )
        if max(self.delimiters, default=0) >= model.vocab_size:
            raise OptionError(
                f"delimiters: expected ids below {model.vocab_size}, received "
                f"{self.delimiters}; take them from the model's tokenizer"
            )
        run = super().open(model, prompt, length, **options)
        run.canvas.follows = bool(self.delimiters)
        return run

    def decode(self, run: CanvasRun) -> Generation:
        """Fill the canvas of a run of this policy."""
        memory = SelectorState.of(run)
        selector = self.chooser(run, memory)
        with run.interruptible():
            while run.is_open:
                seen = run.look()
                if self.delimiters:
                    is_first = run.canvas.start != memory.base
                    run.canvas.shorten(torch.where(is_first, self.end(seen), run.canvas.end))
                    is_open = seen.is_open & run.canvas.active().gather(1, seen.slots)
                    seen = replace(seen, is_open=is_open)
                run.commit(seen, memory.choose(selector, seen))
        return run.generation()

    def end(self, seen: SlotPredictions) -> Tensor:
        """`[B]` int64, the slot behind the likeliest delimiter, or one that is far away."""
        chance = seen.law.softmax(-1)[..., list(self.delimiters)]  # [B, Q, D]
        is_next = seen.is_open[..., None] & (
            seen.law[..., list(self.delimiters)] == seen.law.amax(-1, keepdim=True)
        )
        best, where = torch.where(is_next, chance, -1.0).amax(-1).max(1)
        slot = seen.slots.gather(1, where[:, None])[:, 0]
        return torch.where(best > self.tau, slot + 1, torch.iinfo(torch.int64).max)

    def selector(self, run: CanvasRun, memory: SelectorState) -> Selector:
        """See `SelectorPolicy`."""
        return AtLeast(1, Threshold(self.threshold))
