"""A plain decoder for masked models, to look at them while they are trained.

Choose, then sample: the positions of a step are chosen by the logits (or by an order fixed
beforehand), and only then are tokens drawn there, so that one position a step follows the model's
law. Every step runs the whole line. Decoding in earnest is the samplers' affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.demo.masking import see_all
from mmaccel.errors import OptionError

ORDERS = ("random", "confidence", "left")


@dataclass(frozen=True)
class MaskedModel:
    """A masked model and its ids.

    Attributes:
        model: a causal LM of transformers, run with a mask that hides nothing but padding.
        slots: L, slots of the canvas.
        tokens: ids 0..tokens-1 may be drawn, but for `never`.
        never: ids that may not.
        mask_id, pad_id: of the hidden place and of padding.
        shift: where the logits of position i stand: at i - shift.
    """

    model: Any
    slots: int
    tokens: int
    mask_id: int
    pad_id: int
    shift: int
    never: tuple[int, ...] = ()

    def logits(self, prompts: Sequence[Sequence[int]], canvas: Tensor) -> Tensor:
        """Logits of every slot.

        Args:
            prompts: B rows of ids.
            canvas: [B, L] int64, with `mask_id` in hidden slots.

        Returns:
            [B, L, tokens] float32, the lowest number where an id may not be drawn.
        """
        lengths = torch.tensor([len(p) for p in prompts])
        ids = torch.full((len(prompts), int(lengths.max()) + self.slots), self.pad_id)
        places = lengths[:, None] + torch.arange(self.slots)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        ids.scatter_(1, places, canvas)
        states = self.model.model(
            input_ids=ids, attention_mask=see_all(ids != self.pad_id), use_cache=False
        ).last_hidden_state
        at = (places - self.shift)[..., None].expand(-1, -1, states.shape[-1])
        logits = self.model.lm_head(states.gather(1, at)).float()[..., : self.tokens]
        logits[..., list(self.never)] = torch.finfo(torch.float32).min
        return logits


@torch.no_grad()
def unmask(
    masked: MaskedModel,
    prompts: Sequence[Sequence[int]],
    *,
    seed: int,
    order: str = "random",
    per_step: int = 1,
    temperature: float = 1.0,
    free: Sequence[int] | None = None,
    guidance: float = 1.0,
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Fills a canvas.

    Args:
        masked: the model.
        prompts: B rows of ids.
        seed: fixes orders and tokens of the whole call.
        order: "random", "confidence" (the slot whose likeliest token is likeliest) or "left".
        per_step: slots filled a pass.
        temperature: 0 takes the likeliest tokens.
        free: the unconditional prompt, for `guidance`.
        guidance: logits are u + guidance * (c - u).
        given: [B, L] tokens to put in place of drawn ones; the order stays the rule's.

    Returns:
        Tokens [B, L] int64, and [B] float64, the sum of their log-probabilities as drawn (with
        `given`, one slot a step and "confidence" or "left": the decoder's log-probability of that
        answer).

    Raises:
        OptionError: an unknown order, or guidance without the unconditional prompt.
    """
    if order not in ORDERS:
        raise OptionError(f"order: expected one of {ORDERS}, received {order!r}; choose one")
    if guidance != 1.0 and free is None:
        raise OptionError("free: expected the unconditional prompt, received none; give it")
    rng = torch.Generator().manual_seed(seed)
    shape = (len(prompts), masked.slots)
    canvas = torch.full(shape, masked.mask_id)
    scores = torch.rand(shape, generator=rng)
    if order == "left":
        scores = -torch.arange(masked.slots).float().expand(shape)
    total = torch.zeros(shape[0], dtype=torch.float64)
    while bool((hidden := canvas == masked.mask_id).any()):
        logits = masked.logits(prompts, canvas)
        if free is not None and guidance != 1.0:
            base = masked.logits([free] * shape[0], canvas)
            logits = base + guidance * (logits - base)
        logs = (logits.double() / (temperature or 1.0)).log_softmax(-1)
        if order == "confidence":
            scores = logs.amax(-1)
        chosen = scores.masked_fill(~hidden, -torch.inf).topk(min(per_step, int(hidden[0].sum())))
        at = chosen.indices
        laws = logs.gather(1, at[..., None].expand(-1, -1, logs.shape[-1]))
        if given is not None:
            tokens = given.gather(1, at)
        elif temperature == 0:
            tokens = laws.argmax(-1)
        else:
            flat = laws.exp().flatten(0, 1)
            tokens = flat.multinomial(1, generator=rng).view(at.shape)
        total += laws.gather(-1, tokens[..., None])[..., 0].sum(1)
        canvas.scatter_(1, at, tokens)
    return canvas, total
