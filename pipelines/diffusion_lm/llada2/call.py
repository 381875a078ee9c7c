"""One call of `LLaDA2Pipeline`: its arguments, and its canvas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.pipelines.diffusion_lm.pipeline_service import callback_tensors, count_to_end

CALLBACK_TENSORS = ("block_x",)
"""Tensors that a canvas policy can hand to `callback_on_step_end`; the others are intermediate
values of the pipeline's own scheduler."""


@dataclass
class BlockCall:
    """Arguments of a call, defaults filled in.

    Attributes:
        asked: those that the caller gave, by name.
        arguments: all of them.
        block: `block_length`, or the scheduler's.
        length: `gen_length`.
        mask_token, end_token: ids, the tokenizer's by default; -1 for none.
        n_prompt: columns of the prompt; set when the pipeline has prepared it.
    """

    asked: Mapping[str, Any]
    arguments: Mapping[str, Any]
    block: Any
    length: Any
    mask_token: int
    end_token: int
    n_prompt: int = 0

    @staticmethod
    def of(pipe: Any, asked: Mapping[str, Any], arguments: Mapping[str, Any]) -> BlockCall:
        """The call of a pipeline; see `bind_call`."""

        def pick(name: str) -> int:
            value = arguments.get(name)
            value = getattr(pipe, name) if value is None else value
            return -1 if value is None else int(value)

        block = arguments.get("block_length")
        return BlockCall(
            asked,
            arguments,
            pipe.scheduler.config.block_length if block is None else block,
            arguments.get("gen_length"),
            pick("mask_token_id"),
            pick("eos_token_id"),
        )

    @property
    def is_valid(self) -> bool:
        """Whether there is anything to decode; if not, the pipeline itself raises the error."""
        counts = (self.block, self.length)
        return self.mask_token >= 0 and all(isinstance(n, int) and n > 0 for n in counts)

    @property
    def max_new_columns(self) -> int:
        """Columns that may follow those of the first model call."""
        return int(self.length) + 2 * int(self.block)

    @property
    def stops(self) -> bool:
        """Whether a row ends at its first end token."""
        return bool(self.arguments.get("eos_early_stop")) and self.end_token >= 0

    @property
    def callback_tensors(self) -> list[str]:
        """Names of the tensors that the step callback asks for."""
        return callback_tensors(self.arguments, CALLBACK_TENSORS)

    @property
    def obstacle(self) -> str:
        """Why no canvas policy can serve the call; empty if one can."""
        beyond = [name for name in self.callback_tensors if name not in CALLBACK_TENSORS]
        if self.arguments.get("callback_on_step_end") is not None and beyond:
            return f"a callback that asks for {', '.join(beyond)} of the pipeline's own scheduler"
        return ""

    def canvas(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The slots `[B, L]` of prompts and canvases `[B, N]` int64, and which are committed."""
        slots = tokens.new_full((tokens.shape[0], self.length), self.mask_token)
        generated = tokens[:, self.n_prompt : self.n_prompt + self.length]
        slots[:, : generated.shape[1]] = generated
        return slots, slots.ne(self.mask_token)

    def count(self, sequences: Tensor) -> int:
        """Tokens of `[B, L]` sequences, each row's up to its first end token."""
        index = torch.arange(sequences.shape[1], device=sequences.device)
        is_row = index < count_to_end(sequences, self.end_token)[:, None]
        return int((is_row & (sequences != self.mask_token)).sum())


def check_prompt(ids: Tensor, visible: Tensor, mask_token: int) -> None:
    """Refuse a mask token in a prompt, `[B, T]` int64 both.

    Raises:
        OptionError: with the row; the pipeline would fill it in one block and leave it in another.
    """
    found = (ids == mask_token) & visible.to(ids.device).bool()
    if bool(found.any()):
        row = int(found.view(-1, ids.shape[-1]).any(1).nonzero()[0])
        raise OptionError(
            f"prompt: expected no mask token, received id {mask_token} in row {row}; leave the "
            "open slots to gen_length"
        )
