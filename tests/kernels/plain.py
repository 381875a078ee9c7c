"""Operations in plain loops and float64, which share no code with the versions that they check.

Each function has the name and the signature of a kernel's specification.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mmaccel.kernels import noise as philox
from mmaccel.kernels.sample import Sampled, Settings
from mmaccel.kernels.unmask import Unmasked
from mmaccel.kernels.window_attention import Blocks

NEVER = -math.inf


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, *, scale: float, softcap: float | None = None,
    window: int | None = None, tree: Tensor | None = None, blocks: Blocks | None = None,
    ragged: bool = False, num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One query at a time, over the keys that the rules let it see."""
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    logs = torch.full(q.shape[:3], NEVER, dtype=torch.float64)
    rules = {"window": window, "tree": tree, "blocks": blocks}
    for row, first in enumerate(start.tolist()):
        for head in range(heads):
            for w in range(q.shape[2]):
                n_before = min(max(first + w + 1, 0), k.shape[2])
                seen = [n for n in range(n_before) if _sees(row, head, first, w, n, rules)]
                if not seen:
                    continue
                keys, values = k[row, head, seen].double(), v[row, head, seen].double()
                for own in range(head * group, (head + 1) * group):
                    scores = keys @ q[row, own, w].double() * scale
                    if softcap is not None:
                        scores = softcap * (scores / softcap).tanh()
                    logs[row, own, w] = scores.logsumexp(0)
                    out[row, own, w] = scores.softmax(0) @ values
    return out.to(q.dtype), logs.float()


def _sees(row: int, head: int, first: int, w: int, n: int, rules: dict[str, Any]) -> bool:
    """Whether query w of a row sees position n under a key head: the rules one by one."""
    position, tree, blocks = first + w, rules["tree"], rules["blocks"]
    if rules["window"] is not None and n <= position - rules["window"]:
        return False
    if tree is not None and n >= first:
        bits = tree[row] if tree.ndim == 3 else tree
        if not bits[w, n - first]:
            return False
    if blocks is not None:
        listed = blocks.index[row, head].tolist()[: int(blocks.count[row, head])]
        if n // blocks.size not in listed:
            return False
    return True


def column_mass(
    q: Tensor, k: Tensor, lse: Tensor, start: Tensor, *, scale: float, weights: Tensor | None = None
) -> Tensor:
    """Columns of whole attention maps, whose log-sum-exps are their own."""
    mass = torch.zeros(k.shape[:3], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for row, first in enumerate(start.tolist()):
        for head in range(q.shape[1]):
            for w in range(q.shape[2]):
                n_seen = min(first + w + 1, k.shape[2])
                if n_seen > 0:
                    keys = k[row, head // group, :n_seen].double()
                    attention = (keys @ q[row, head, w].double() * scale).softmax(0)
                    weight = 1.0 if weights is None else float(weights[row, w])
                    mass[row, head // group, :n_seen] += weight * attention
    return mass.float()


def _gumbels(*key: Any) -> Tensor:
    return philox.to_gumbel(philox.uniforms(*key))


def unmask(
    logits: Tensor, masked: Tensor, temperature: float, seeds: Tensor, items: Tensor,
    slots: Tensor, purpose: Tensor,
) -> Unmasked:  # fmt: skip
    """One position at a time, in doubles; the noise is the library's."""
    noise = _gumbels(seeds, items, slots, logits.shape[-1], purpose)
    made = Unmasked(
        torch.full(masked.shape, -1),
        *(torch.full(masked.shape, value) for value in (NEVER, math.inf, NEVER, NEVER)),
    )
    for row, position in masked.nonzero().tolist():
        own = logits[row, position].double()
        if own.max() == NEVER:
            continue
        p = own.softmax(0).tolist()
        ordered = [*sorted(p, reverse=True), 0.0]
        noisy = (own.float() + temperature * noise[row, position]).tolist()
        token = noisy.index(max(noisy))
        entropy = -sum(x * math.log(x) for x in p if x)
        for part, value in zip(
            made, (token, p[token], entropy, ordered[0] - ordered[1], ordered[0])
        ):
            part[row, position] = value
    return made


def sample_frozen(
    logits: Tensor, branches: int, settings: Settings, mask: Tensor | None, seeds: Tensor,
    items: Tensor, slots: Tensor, purpose: Tensor, forced: Tensor | None = None,
    last: Tensor | None = None,
) -> Sampled:  # fmt: skip
    """One filter after the other, one slot at a time, in doubles; the noise is the library's."""
    shape, n_values = slots.shape, logits.shape[-1]
    parts = logits.double().unflatten(0, (branches, -1))
    scores = parts[0]
    if branches > 1:
        free, image = parts[-1], parts[1] if branches == 3 else parts[0]
        share = settings.second_scale if branches == 3 else settings.scale
        scores = free + share * (image - free)
        if branches == 3:
            scores = scores + settings.scale * (parts[0] - image)
    if mask is not None:
        scores = scores.masked_fill(~mask.expand_as(scores), NEVER)
    scores = scores / (settings.temperature or 1.0)
    if last is not None:
        last.copy_(scores[:, -1])
    noise = _gumbels(seeds, items, slots, n_values, purpose).double()
    made = Sampled(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), torch.zeros(shape))
    for row in range(shape[0]):
        for slot in range(shape[1]):
            own = scores[row, slot].tolist()
            if forced is not None and forced[row, slot] >= 0:
                made.tokens[row, slot] = forced[row, slot]
                continue  # of score 0 alone
            if max(own) == NEVER:  # nothing may stand here
                made.peak[row, slot] = made.lse[row, slot] = (
                    NEVER if settings.temperature else math.nan
                )
                continue
            kept = _stay(own, settings)
            made.tokens[row, slot] = kept[0]
            if settings.temperature:  # else all of it is the first one's, whose score is 0
                drawn = noise[row, slot].tolist()
                made.tokens[row, slot] = max(kept, key=lambda v: (own[v] + drawn[v], -v))  # noqa: B023
                made.peak[row, slot] = max(own)
                made.lse[row, slot] = torch.tensor([own[v] for v in kept]).double().logsumexp(0)
    return made


def _stay(scores: list[float], settings: Settings) -> list[int]:
    """Ids that stay, one filter after the other."""
    order = sorted(range(len(scores)), key=lambda v: (-scores[v], v))
    if not settings.temperature:
        return order[:1]
    if settings.top_k is not None and settings.top_k < len(order):
        order = [v for v in order if scores[v] >= scores[order[settings.top_k - 1]]]
    highest = scores[order[0]]
    weights = [math.exp(scores[v] - highest) if scores[v] > NEVER else 0.0 for v in order]
    if settings.top_p is not None:
        total, before, kept = sum(weights), 0.0, []
        for v, weight in zip(order, weights):
            if before < settings.top_p:
                kept.append(v)
            before += weight / total
        order = kept
    if settings.min_p is not None:
        order = [v for v in order if scores[v] >= highest + math.log(settings.min_p)]
    return order
