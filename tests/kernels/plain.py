"""Operations in plain loops and float64, which share no code with the versions that they check.

Each function has the name and the signature of a kernel's specification.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mmaccel.kernels import noise as philox
from mmaccel.kernels.gated_act import Activation
from mmaccel.kernels.norm import HeadNorms, Norm
from mmaccel.kernels.sample import Sampled, Settings
from mmaccel.kernels.unmask import Unmasked
from mmaccel.kernels.window_attention import Blocks, Grid
from mmaccel.kernels.window_inputs import WindowInputs

NEVER = -math.inf


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor, *, scale: float, softcap: float | None = None,
    window: int | None = None, tree: Tensor | None = None, blocks: Blocks | None = None,
    grid: Grid | None = None, lse: bool = False, ragged: bool = False,
) -> Any:  # fmt: skip
    """One query at a time, over the keys that the rules let it see."""
    heads, group = k.shape[1], q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    logs = torch.full(q.shape[:3], NEVER, dtype=torch.float64)
    rules = {"window": window, "tree": tree, "blocks": blocks, "grid": grid}
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
    made = out.to(q.dtype)
    return (made, logs.float()) if lse else made


def _sees(row: int, head: int, first: int, w: int, n: int, rules: dict[str, Any]) -> bool:
    """Whether query w of a row sees position n under a key head: the rules one by one."""
    position, tree, blocks, grid = first + w, rules["tree"], rules["blocks"], rules["grid"]
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
    if grid is not None and n >= int(grid.text[row]):
        text = int(grid.text[row])
        row_n, column_n = divmod(n - text, grid.columns)
        row_q, column_q = divmod(position - text, grid.columns)
        if max(abs(row_n - row_q), abs(column_n - column_q)) > grid.radius:
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


def compact(store: Tensor, keep: Tensor, start: Tensor | None = None) -> Tensor:
    """One position of one head at a time."""
    before = store.clone()
    for row in range(store.shape[0]):
        first = 0 if start is None else int(start[row])
        for head in range(store.shape[2]):
            own = keep[row] if keep.ndim == 2 else keep[row, head]
            for i, position in enumerate(p for p in own.tolist() if p >= 0):
                store[row, first + i, head] = before[row, position, head]
    return store


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


def add_norm(
    hidden: Tensor, update: Tensor | None, norm: Norm | None, *, post: Norm | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The formulas; a norm of the update is rounded to the dtype before it is added."""
    total = hidden
    if update is not None:
        added = update if post is None else _normalise(update, post.weight, post.bias, post)
        total = (hidden.double() + scale * added.double()).to(hidden.dtype)
    return total, total if norm is None else _normalise(total, norm.weight, norm.bias, norm)


def _normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm | HeadNorms
) -> Tensor:
    """A norm of the last axis as its formula."""
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True) if norm.kind == "layer" else wide
    made = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    if weight is not None:
        made = made * (weight.double() + norm.offset)
    return (made if bias is None else made + bias.double()).to(x.dtype)


def rope_write(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, keys: Tensor, values: Tensor,
    index: Tensor, *, interleaved: bool = False, grouped: bool = False,
    norms: HeadNorms | None = None,
) -> Tensor:  # fmt: skip
    """Heads in the usual order, then norms, then pairs that turn, then one token's place each."""
    kv_heads, width = keys.shape[1:]
    heads = qkv.view(len(qkv), -1, width)
    n_queries = heads.shape[1] - 2 * kv_heads
    if grouped:
        group = n_queries // kv_heads
        ends = range(group, heads.shape[1], group + 2)  # the key of each group
        queries_at = [end - group + i for end in ends for i in range(group)]
        heads = heads[:, [*queries_at, *ends, *(end + 1 for end in ends)]]
    queries, own_keys, own_values = heads.split([n_queries, kv_heads, kv_heads], 1)
    if norms is not None:
        queries = _normalise_heads(queries, norms.q_weight, norms.q_bias, norms)
        own_keys = _normalise_heads(own_keys, norms.k_weight, norms.k_bias, norms)
    if cos is not None and sin is not None:
        queries, own_keys = (_turn(part, cos, sin, interleaved) for part in (queries, own_keys))
    for token, place in enumerate(index.tolist()):
        keys[place], values[place] = own_keys[token], own_values[token]
    return queries


def _normalise_heads(
    heads: Tensor, weight: Tensor | None, bias: Tensor | None, norms: HeadNorms
) -> Tensor:
    """Over each head, or over all where there is a weight for every number of all."""
    is_flat = weight is not None and weight.shape == (heads[0].numel(),) and heads.shape[1] > 1
    states = heads.flatten(1) if is_flat else heads
    return _normalise(states, weight, bias, norms).view(heads.shape)


def _turn(heads: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    n_turned, made = cos.shape[1], heads.double().clone()
    for i in range(0, n_turned, 2):
        a, b = (i, i + 1) if interleaved else (i // 2, i // 2 + n_turned // 2)
        for own, other in ((a, b), (b, a)):
            turned = heads[..., own].double() * cos[:, own, None].double()
            made[..., own] = turned + heads[..., other].double() * sin[:, own, None].double()
    return made.to(heads.dtype)


def gated_act(packed: Tensor, kind: Activation = "silu") -> Tensor:
    """The formulas of the three activations."""
    gate, up = packed.double().chunk(2, -1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    acted = {
        "silu": gate / (1 + (-gate).exp()),
        "gelu": gate * (gate / math.sqrt(2)).mul(-1).erfc() / 2,
        "gelu_tanh": gate * (1 + inner.tanh()) / 2,
    }
    return (acted[kind] * up).to(packed.dtype)


def window_inputs(
    tokens: Tensor, n_generated: Tensor, filled: Tensor, last_of_prompt: Tensor, lengths: Tensor,
    proposed: Tensor | None, forced: Tensor | None, *, origin: int, width: int,
) -> WindowInputs:  # fmt: skip
    """One slot of one row at a time."""
    batch, n_rows = len(tokens), len(lengths)
    drafts = None if proposed is None else torch.zeros_like(proposed)
    for row in range(batch if proposed is not None else 0):
        for slot in range(width - 1):
            column = origin + int(n_generated[row]) + slot
            draft = tokens[row, column] if column < filled[row] else proposed[row, slot]  # type: ignore[index]
            if forced is not None and forced[row, slot] >= 0:
                draft = forced[row, slot]
            drafts[row, slot] = tokens[row, column] = draft  # type: ignore[index]
    read = torch.zeros(n_rows, width, dtype=torch.int64)
    for row in range(n_rows):
        own, first = row % batch, origin + int(n_generated[row % batch]) - 1
        read[row] = tokens[own, first : first + width]
        if first < origin:
            read[row, 0] = last_of_prompt[row, 0]
    start = torch.stack([lengths[row] - 1 + n_generated[row % batch] for row in range(n_rows)])
    return WindowInputs(drafts, read, start)
