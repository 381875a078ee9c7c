"""One call of `LLaDA2Pipeline`: what its arguments say, and how its canvas is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import OptionError

CALLBACK_TENSORS = ("block_x",)
"""Tensors that a canvas policy can hand to `callback_on_step_end`; the others are intermediate
values of the pipeline's own scheduler."""


@dataclass
class BlockCall:
    """Arguments of a call, defaults filled in.

    Attributes:
        arguments: all of them.
        block: `block_length`, or the scheduler's.
        length: `gen_length`.
        mask_token, end_token: ids, the tokenizer's by default; -1 where there is none.
        n_prompt: columns of the prompt; known once the pipeline has prepared it.
    """

    arguments: Mapping[str, Any]
    block: Any
    length: Any
    mask_token: int
    end_token: int
    n_prompt: int = 0

    @staticmethod
    def of(pipe: Any, arguments: Mapping[str, Any]) -> BlockCall:
        """The call a pipeline got."""

        def pick(name: str) -> int:
            value = arguments.get(name)
            value = getattr(pipe, name) if value is None else value
            return -1 if value is None else int(value)

        block = arguments.get("block_length")
        return BlockCall(
            arguments,
            pipe.scheduler.config.block_length if block is None else block,
            arguments.get("gen_length"),
            pick("mask_token_id"),
            pick("eos_token_id"),
        )

    @property
    def is_sound(self) -> bool:
        """Whether there is anything to decode; the pipeline itself says what is wrong if not."""
        counts = (self.block, self.length)
        return self.mask_token >= 0 and all(isinstance(n, int) and n > 0 for n in counts)

    @property
    def room(self) -> int:
        """Columns that may follow those of the first model call."""
        return int(self.length) + 2 * int(self.block)

    @property
    def stops(self) -> bool:
        """Whether a row ends at its first end token."""
        return bool(self.arguments.get("eos_early_stop")) and self.end_token >= 0

    @property
    def callback_tensors(self) -> tuple[str, ...]:
        """What the step callback asks for."""
        callback = self.arguments.get("callback_on_step_end")
        own = getattr(callback, "tensor_inputs", None)
        names = self.arguments.get("callback_on_step_end_tensor_inputs") if own is None else own
        return CALLBACK_TENSORS if names is None else tuple(names)

    @property
    def obstacle(self) -> str:
        """Why no canvas policy can serve the call; an empty text where one can."""
        beyond = [name for name in self.callback_tensors if name not in CALLBACK_TENSORS]
        if self.arguments.get("callback_on_step_end") is not None and beyond:
            return f"a callback that asks for {', '.join(beyond)} of the pipeline's own scheduler"
        return ""

    def canvas(self, line: Tensor) -> tuple[Tensor, Tensor]:
        """Of a line `[B, N]` int64, prompts in it: slots `[B, L]`, and which are committed."""
        tokens = line.new_full((line.shape[0], self.length), self.mask_token)
        made = line[:, self.n_prompt : self.n_prompt + self.length]
        tokens[:, : made.shape[1]] = made
        return tokens, tokens.ne(self.mask_token)

    def ends(self, sequences: Tensor) -> Tensor:
        """`[B]` int64, slots of `sequences` `[B, L]` up to the first end token."""
        index = torch.arange(sequences.shape[1], device=sequences.device)
        is_end = sequences == self.end_token
        return torch.where(is_end, index + 1, sequences.shape[1]).amin(1)

    def count(self, sequences: Tensor) -> int:
        """Tokens made, each row's up to its first end token."""
        index = torch.arange(sequences.shape[1], device=sequences.device)
        made = (index < self.ends(sequences)[:, None]) & (sequences != self.mask_token)
        return int(made.sum())


def check_prompt(ids: Tensor, visible: Tensor, mask_token: int) -> None:
    """Refuse a mask token in a prompt, `[B, T]` int64 both.

    Raises:
        OptionError: the pipeline would fill it in one block and leave it in another.
    """
    found = (ids == mask_token) & visible.to(ids.device).bool()
    if bool(found.any()):
        row = int(found.view(-1, ids.shape[-1]).any(1).nonzero()[0])
        raise OptionError(
            f"prompt: expected no mask token, received id {mask_token} in row {row}; leave the "
            "tokens to be made to gen_length"
        )
