"""Masked training and a plain masked decoder.

Training: absorbing-state diffusion, Austin et al., 2021, arXiv 2107.03006; Nie et al., 2025, arXiv
2502.09992. Departures: the number of hidden slots is drawn, not each slot's coin, and the numbers
are spread evenly over a batch, as Sahoo et al., 2024, arXiv 2406.07524, spread continuous times.

The decoder measures a model while it is trained. It chooses first and samples second: the positions
of a step are chosen by the logits (or by an order fixed beforehand), and only then are tokens drawn
there, so that one position a step follows the model's distribution. Every step runs the whole row.
Users decode with the policies of `mmaccel.samplers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmaccel.errors import OptionError
from scripts.training.data import IGNORE


def draw_counts(rng: np.random.Generator, rows: int, slots: int) -> np.ndarray:
    """How many slots each row hides, int64 [rows]: each uniform on 1..slots, together even.

    With as many rows as slots, every number comes once.
    """
    shares = (rng.permutation(rows) + rng.random()) / rows
    return (shares * slots).astype(np.int64) + 1


def hide(slots: Tensor, counts: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Chooses which slots to hide.

    Args:
        slots: [B, T] bool, those that may be hidden.
        counts: [B], how many; at most as many as the row has.
        rng: draws them.

    Returns:
        [B, T] bool on the CPU, `counts[b]` of row b's slots.
    """
    keys = rng.random(tuple(slots.shape))
    keys[~slots.cpu().numpy()] = 2.0
    ranks = keys.argsort(axis=1).argsort(axis=1)
    return torch.from_numpy(ranks < counts[:, None])


def see_all(valid: Tensor) -> Tensor:
    """Additive attention mask under which every position attends to every valid one.

    Args:
        valid: [B, T] bool.

    Returns:
        [B, 1, T, T] float32, 0 or the lowest number. transformers' models take a mask of four
        dimensions as it is, so a causal model given this one attends both ways.
    """
    mask = torch.zeros(valid.shape, device=valid.device)
    mask.masked_fill_(~valid, torch.finfo(torch.float32).min)
    return mask[:, None, None, :].expand(-1, 1, valid.shape[1], -1)


def hidden_losses(
    model: Any, ids: Tensor, hidden: Tensor, *, mask_id: int, pad_id: int, shift: int
) -> Tensor:
    """Cross-entropy of each hidden token, in nats.

    Args:
        model: a causal LM of transformers.
        ids: [B, T] int64, the whole truth, padded.
        hidden: [B, T] bool, what the model does not see.
        mask_id: stands in the hidden places.
        pad_id: of padding, which no position attends to.
        shift: where the logits of position i stand: at i - shift.

    Returns:
        [N] float32, row by row.
    """
    seen = ids.masked_fill(hidden, mask_id)
    states = model.model(
        input_ids=seen, attention_mask=see_all(ids != pad_id), use_cache=False
    ).last_hidden_state
    states = states[:, : ids.shape[1] - shift][hidden[:, shift:]]
    return cross_entropy(model.lm_head(states).float(), ids[hidden], reduction="none")


def masked_loss(losses: Tensor, hidden: Tensor, power: float = 1.0) -> Tensor:
    """One number to descend.

    Args:
        losses: of `hidden_losses`.
        hidden: [B, T] bool, at least one in each row.
        power: a row with n hidden slots weighs n ** (1 - power). At 1 rows weigh the same and the
            expectation is the bound on the negative log-likelihood per slot, which is also the
            mean loss of decoding one slot a step in random order; at 0 tokens weigh the same.

    Returns:
        Scalar, nats per slot.
    """
    counts = hidden.sum(1)
    rows = counts.float() ** (1 - power)
    weights = (rows / rows.sum() / counts).repeat_interleave(counts)
    return (losses * weights).sum()


def slots_of(labels: Tensor) -> Tensor:
    """[B, T] bool: the slots that may be hidden, which are those with a label."""
    return labels != IGNORE


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
        chosen_logs = logs.gather(1, at[..., None].expand(-1, -1, logs.shape[-1]))
        if given is not None:
            tokens = given.gather(1, at)
        elif temperature == 0:
            tokens = chosen_logs.argmax(-1)
        else:
            flat = chosen_logs.exp().flatten(0, 1)
            tokens = flat.multinomial(1, generator=rng).view(at.shape)
        total += chosen_logs.gather(-1, tokens[..., None])[..., 0].sum(1)
        canvas.scatter_(1, at, tokens)
    return canvas, total
