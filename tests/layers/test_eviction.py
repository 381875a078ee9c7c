"""Eviction: identity under a large budget, a mask over the full cache under a small one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import ContinuousBatching, Noise, SamplingParams
from mmaccel.catalog import METHODS, load
from mmaccel.contracts import FinishedRow, Pass
from mmaccel.kernels.noise import key_schedule, philox
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers import eviction
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.pipelines.hosts.layers.observing import Observed, Observer
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout, WindowLayer
from mmaccel.pipelines.hosts.transformers_release import CACHE
from mmaccel.reduction.kv_cache.contract import CacheMethod
from mmaccel.results import Generation
from tests.fixtures.lanes import every, fast_first
from tests.fixtures.next_scale import keep_scale_kv
from tests.fixtures.tiny_lms import PAD, VOCAB, build_lm, falls_back, left_padded
from tests.fixtures.toy_models import make_prompt
from tests.layers.masked_model import greedy_rows, list_full
from tests.layers.planted import EVICTION

N_NEW = 14
LENGTHS = (33, 12, 21)
ROUTES = (True, False)  # the fused decoder, and the model's own forward


def draw_rows(*lengths: int) -> list[list[int]]:
    """Random prompts of the lengths."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def generate(model: Any, policy: Any, rows: list[list[int]], **options: Any) -> Any:
    """Tokens `[B, N_NEW]`, and the statistics."""
    fused = options.pop("fused", "auto")
    names = {"kv_cache", "attention", "share_prefix", "prefill_chunk_size"} & {*options}
    methods = {name: options.pop(name) for name in names}
    given: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    given["max_new_tokens"] = N_NEW
    given |= options
    prompts = inputs_of(model, rows, given.pop("embeds", False))
    with mmaccel.attach(model, policy, seed=4, fused=fused, strict=True, **methods) as handle:
        out = model.generate(**prompts, **given)
    return out[:, out.shape[1] - given["max_new_tokens"] :], handle.stats


def inputs_of(model: Any, rows: list[list[int]], embeds: bool = False) -> dict[str, Any]:
    """A left-padded batch; its embeddings in place of ids on demand."""
    inputs: dict[str, Any] = left_padded(rows)
    if embeds:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    return inputs


@cache
def whole(name: str, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """The plain loop's tokens over the whole cache."""
    tokens: Tensor = generate(build_lm(name), mmaccel.Autoregressive(), draw_rows(*lengths))[0]
    return tokens


@dataclass(frozen=True)
class Prompt:
    """A layer's view of one row's whole prompt: queries `[Hq, T, D]`, keys and values
    `[Hkv, T, D]`, its number, and the layers of the model; those that slide do not count.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    index: int
    depth: int
    received: tuple[Tensor, ...] = ()  # of each key head, where all queries are not there
    stamps: tuple[Tensor, ...] = ()  # of each key head, when an entry was attended to last
    held: tuple[tuple[int, list[int]], ...] = ()  # each key head's number and positions, in rounds
    is_far: tuple[bool, ...] = ()  # each key head, whether it has been found to look far

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    def weights(self, head: int) -> Tensor:
        """`[G, T, T]`, what each query of a key head gives to each entry up to its own."""
        groups = len(self.queries) // len(self.keys)
        own = self.queries[head * groups : (head + 1) * groups]
        scores = own @ self.keys[head].T * self.keys.shape[-1] ** -0.5
        later = torch.ones(self.length, self.length).triu(1).bool()
        return scores.masked_fill(later, float("-inf")).softmax(-1)

    def votes(self, first: int) -> list[Tensor]:
        """What each entry receives from the queries from `first` on, in each key head."""
        if first == 0 and self.received:
            return list(self.received)
        heads = range(len(self.keys))
        return [self.weights(head)[:, max(first, 0) :].sum((0, 1)) for head in heads]

    def together(self, first: int) -> list[Tensor]:
        """`votes` of all heads together, for each head."""
        return [torch.stack(self.votes(first)).sum(0)] * len(self.keys)


def join_heads(prompts: list[Prompt]) -> Prompt:
    """One view of heads that hold the same entries."""
    joined: dict[str, Any] = {}
    for name, value in vars(prompts[0]).items():
        own = [getattr(prompt, name) for prompt in prompts]
        if isinstance(value, Tensor):
            joined[name] = torch.cat(own)
        elif isinstance(value, tuple):
            joined[name] = sum(own, ())
    return replace(prompts[0], **joined)


Plans = list[list[int]]  # of each key head, the entries that stay


def best(scores: list[Tensor], n: int, *, recent: int = 1, sinks: int = 0) -> Plans:
    """The n highest of each head, the last ones and the first ones among them."""
    found = []
    for of_head in scores:
        ranked = of_head.clone()
        ranked[max(len(ranked) - recent, 0) :] = float("inf")
        ranked[:sinks] = float("inf")
        found.append(sorted(ranked.topk(min(n, len(ranked))).indices.tolist()))
    return found


def pooled(prompt: Prompt, method: Any) -> list[Tensor]:
    """SnapKV's votes."""
    reach, length = method.kernel // 2, prompt.length
    scores = []
    for votes in prompt.votes(length - method.window):
        votes[max(length - method.window, 0) :] = 0  # the window stays in any case
        means = [float(votes[max(i - reach, 0) : i + reach + 1].sum()) for i in range(length)]
        scores.append(torch.tensor(means))
    return scores


def plan_snapkv(prompt: Prompt, method: Any) -> Plans:
    return best(pooled(prompt, method), method.budget, recent=method.window)


def plan_pyramidkv(prompt: Prompt, method: Any) -> Plans:
    if prompt.length <= method.budget:
        return best(pooled(prompt, method), prompt.length)
    mean = method.budget - method.window
    first = min(2 * mean - mean // method.slope, prompt.length - method.window)
    last = 2 * mean - first
    share = first + (last - first) * prompt.index / (prompt.depth - 1)
    return best(pooled(prompt, method), method.window + round(share), recent=method.window)


def plan_chunkkv(prompt: Prompt, method: Any) -> Plans:
    """Chunk after chunk, until the budget is full."""
    length, votes = prompt.length, prompt.together(prompt.length - method.window)[0]
    seen = list(range(length))[max(length - method.window, 0) :]
    chunks = [range(i, min(i + method.chunk, length)) for i in range(0, length, method.chunk)]
    voted = [[i for i in chunk if i not in seen] for chunk in chunks]
    order = sorted(
        (chunk for chunk in voted if chunk),
        key=lambda chunk: -float(votes[chunk].mean()),
    )
    kept = (seen + [i for chunk in order for i in chunk])[: method.budget]
    return [sorted(kept)] * len(prompt.keys)


def plan_citrus(prompt: Prompt, method: Any) -> Plans:
    votes = prompt.together(prompt.length - method.instruction)
    return best(votes, method.budget, recent=method.instruction)


def plan_tova(prompt: Prompt, method: Any) -> Plans:
    return best(prompt.together(prompt.length - 1), method.budget)


def plan_h2o(prompt: Prompt, method: Any) -> Plans:
    return best(prompt.votes(0), method.budget, recent=int(method.budget * method.recent))


def plan_vatp(prompt: Prompt, method: Any) -> Plans:
    pairs = zip(prompt.votes(0), prompt.values)
    scores = [votes * values.abs().sum(-1) for votes, values in pairs]
    recent = int(method.budget * method.recent)
    return best(scores, method.budget, recent=recent, sinks=method.sinks)


def rotation(position: int, width: int) -> Tensor:
    """The matrix of RoFormer's equation 15 for halves that are turned together."""
    angles = position * 10_000.0 ** (-torch.arange(0, width, 2).double() / width)
    cos, sin = angles.cos().diag(), angles.sin().diag()
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)]).float()


def plan_expected_attention(prompt: Prompt, method: Any) -> Plans:
    """By the mean and the covariance of numpy, one query head at a time, of queries that are
    turned back to position 0 and then on by the mean of 512 positions.
    """
    groups, width = len(prompt.queries) // len(prompt.keys), prompt.keys.shape[-1]
    first, scores = max(prompt.length - method.window, method.sinks), []
    ahead = sum(rotation(prompt.length + i, width) for i in range(512)) / 512
    for head, keys in enumerate(prompt.keys):
        total = torch.zeros(prompt.length)
        for query_head in range(head * groups, (head + 1) * groups):
            rotated = prompt.queries[query_head]
            backs = [rotation(-i, width) @ rotated[i] for i in range(first, prompt.length)]
            asked = torch.stack(backs) @ ahead.T
            covariance = torch.from_numpy(np.cov(asked.numpy(), rowvar=False, bias=True)).float()
            logits = [
                float(asked.mean(0) @ key / width**0.5 + key @ covariance @ key / (2 * width))
                for key in keys
            ]
            total[method.sinks :] += torch.tensor(logits[method.sinks :]).softmax(-1)
        scores.append(total * prompt.values[head].norm(dim=-1))
    return best(scores, method.budget, sinks=method.sinks)


def plan_knorm(prompt: Prompt, method: Any) -> Plans:
    n = prompt.length if prompt.index < method.first_layer else method.budget
    return best([-(keys**2).sum(-1) for keys in prompt.keys], n)


def plan_keydiff(prompt: Prompt, method: Any) -> Plans:
    scores = []
    for keys in prompt.keys:
        directions = torch.stack([key / key.norm() for key in keys])
        scores.append(-(directions @ directions.mean(0)))
    return best(scores, method.budget)


def plan_streaming_llm(prompt: Prompt, method: Any) -> Plans:
    order = list(range(prompt.length))
    sinks, others = order[: method.sinks], order[method.sinks :]
    return [sinks + others[-(method.budget - method.sinks) :]] * len(prompt.keys)


def plan_morphkv(prompt: Prompt, method: Any) -> Plans:
    return best(prompt.votes(prompt.length - method.window), method.budget, recent=method.window)


def plan_kvzap(prompt: Prompt, method: Any) -> Plans:
    """What one of the last queries gives to an entry, times the length of its value, by logs."""
    found = []
    for head, values in enumerate(prompt.values):
        most = prompt.weights(head)[:, -method.window :].amax((0, 1))
        sizes = values.norm(dim=-1)
        scores = most.log() + sizes.log() - sizes.mean().log()
        recent = prompt.length - method.budget
        found.append([i for i, s in enumerate(scores) if s >= method.threshold or i >= recent])
    return found


@torch.no_grad()
def plan_kvzip(model: Any, ids: list[int], method: Any) -> Any:
    """By the attention maps that transformers' model gives out while its prompt is repeated."""
    from transformers import DynamicCache

    eager = deepcopy(model)
    eager.set_attn_implementation("eager")
    n = len(ids)
    cache = DynamicCache(config=model.config)
    eager(torch.tensor([ids]), **{CACHE: cache}, use_cache=True)
    heads = model.config.num_key_value_heads
    full = list_full(model)
    most = torch.zeros(len(full), heads, n)
    for first in range(0, n, method.piece):
        given = {CACHE: deepcopy(cache), "use_cache": True, "output_attentions": True}
        piece = torch.tensor([ids[first : first + method.piece]])
        attentions = eager(piece, **given).attentions
        for layer, number in enumerate(full):
            received = attentions[number][0].unflatten(0, (heads, -1)).amax((1, 2))[:, :n]
            most[layer] = most[layer].maximum(received)

    def plan(prompt: Prompt, method: Any) -> Plans:
        scores = most.clone()
        scores[..., : method.sinks] = scores[..., -1] = float("inf")
        if n <= method.budget:
            return [list(range(n))] * heads
        best = scores.flatten().topk(method.budget * heads * prompt.depth).indices.tolist()
        own = [divmod(i, n) for i in best if i // n // heads == prompt.index]
        return [sorted(i for at, i in own if at % heads == head) for head in range(heads)]

    return plan


def is_merged(i: int, length: int, method: Any) -> bool:
    """Whether an entry may be merged."""
    return bool(method.sinks <= i < length - method.recent)


def cosine(keys: Tensor, i: int, j: int) -> float:
    return float(keys[i] @ keys[j] / keys[i].norm() / keys[j].norm())


def plan_chelsea(prompt: Prompt, method: Any) -> Plans:
    """Repetition by repetition, until few enough are left."""
    length, found = prompt.length, []
    for keys in prompt.keys:
        left = set(range(length))
        step = 1
        while len(left) > method.budget and step < method.chunk:
            pairs = []
            for i in range(length):
                place, start = i % method.chunk, i - i % method.chunk
                if place % (2 * step) != step or not is_merged(i, length, method):
                    continue
                others = [
                    j for j in range(start, min(start + method.chunk, length))
                    if j % method.chunk % (2 * step) == 0 and is_merged(j, length, method)
                ]  # fmt: skip
                pairs.append((max([cosine(keys, i, j) for j in others], default=-2), i))
            pairs.sort(reverse=True)
            left -= {i for _, i in pairs[: len(left) - method.budget]}
            step *= 2
        found.append(sorted(left))
    return found


def plan_bilevelkv(prompt: Prompt, method: Any) -> Plans:
    """The ends of groups, then the entries of the chunks that the question attends to."""
    length, found = prompt.length, []
    end = length - method.question
    votes = prompt.together(end)[0]
    chunks = [range(i, min(i + method.chunk, end)) for i in range(0, end, method.chunk)]
    order = sorted((c for c in chunks if c), key=lambda chunk: -float(votes[chunk].mean()))
    is_last = [i % method.pool == method.pool - 1 or i == end - 1 for i in range(length)]
    found = list(range(max(end, 0), length))
    found += [i for chunk in order for i in chunk if is_last[i]]
    found += [i for chunk in order for i in chunk if not is_last[i]]
    return [sorted(found[: method.budget])] * len(prompt.keys)


def find_similar(method: Any, keys: Tensor, i: int, kept: list[int], n_prompt: int) -> int | None:
    """Chelsea: the most similar entry of the chunk that stays."""
    start = i - i % method.chunk
    others = [
        j for j in kept
        if start <= j < start + method.chunk and is_merged(j, n_prompt, method)
    ]  # fmt: skip
    return max(others, key=lambda j: cosine(keys, i, j), default=None)


def find_end(method: Any, keys: Tensor, i: int, kept: list[int], n_prompt: int) -> int | None:
    """BiLevelKV: the last entry of the group."""
    last = min(i - i % method.pool + method.pool, n_prompt - method.question) - 1
    return last if last in kept else None


JOINED = {"Chelsea": find_similar, "BiLevelKV": find_end}  # what an entry that goes is merged into


def looks_far(prompt: Prompt, head: int, n_queries: int, method: Any) -> bool:
    """Whether a head attends to what streaming would drop."""
    given = prompt.weights(head)[:, -n_queries:].sum((0, 1))
    far = given[method.sinks : prompt.length - (method.budget - method.sinks)]
    return float(far.sum() / given.sum()) > method.share


def plan_duo_attention(prompt: Prompt, method: Any) -> Plans:
    found = []
    for head in range(len(prompt.keys)):
        is_far = prompt.is_far[head] if prompt.is_far else False
        if prompt.length > method.budget and not prompt.is_far:
            is_far = looks_far(prompt, head, method.window, method)
        recent = max(prompt.length - (method.budget - method.sinks), method.sinks)
        every = range(prompt.length)
        found.append([i for i in every if is_far or i < method.sinks or i >= recent])
    return found


def plan_raas(prompt: Prompt, method: Any) -> Plans:
    """The prompt, and the latest stamps; of equal ones the first."""
    found = []
    for head in range(len(prompt.keys)):
        if not prompt.stamps:
            found.append(list(range(prompt.length)))
            continue
        stamps = prompt.stamps[head].tolist()
        stamps[-1] = float("inf")
        n = max(method.budget, stamps.count(float("inf")))
        order = sorted(range(prompt.length), key=lambda i: (-stamps[i], i))
        found.append(sorted(order[:n]))
    return found


def plan_linekv(prompt: Prompt, method: Any) -> Plans:
    votes = prompt.votes(prompt.length - method.every)
    recent = method.lines * method.every
    return best(votes, method.budget, recent=recent, sinks=method.sinks)


def plan_scale_kv(prompt: Prompt, method: Any) -> Plans:
    """In a text, whose last entries are the grid."""
    length, found = prompt.length, []
    end = max(length - method.window, 0)
    for votes in prompt.votes(end):
        votes[end:] = 0
        last = {*range(end, length)}
        found.append(keep_scale_kv(method, prompt.index, prompt.depth, length, votes, last))
    return found


def plan_random_eviction(prompt: Prompt, method: Any) -> Plans:
    """Philox of the specification, one number at a time."""
    key = (torch.tensor(method.seed), torch.tensor(0))
    scores = [
        torch.tensor(
            [
                float(
                    philox((*map(torch.tensor, (i, head, prompt.index, 0)),), key_schedule(key))[0]
                )
                for i in range(prompt.length)
            ]
        )
        for head in range(len(prompt.keys))
    ]
    return best(scores, method.budget)


REFERENCES = {  # short name, perhaps with a remark -> method, plan
    "snapkv": (mmaccel.SnapKV(budget=12, window=4, kernel=3), plan_snapkv),
    "pyramidkv": (mmaccel.PyramidKV(budget=13, window=4, kernel=3, slope=5), plan_pyramidkv),
    "chunkkv": (mmaccel.ChunkKV(budget=12, chunk=4, window=5), plan_chunkkv),
    "chunkkv, layers share": (
        mmaccel.ChunkKV(budget=13, chunk=3, window=4, reuse=2), plan_chunkkv,
    ),
    "citrus": (mmaccel.CItruS(budget=12, instruction=5), plan_citrus),
    "scale-kv": (mmaccel.ScaleKV(budget=12, window=4, kernel=3, drafters=(1,)), plan_scale_kv),
    "tova": (mmaccel.TOVA(budget=12), plan_tova),
    "h2o": (mmaccel.H2O(budget=12), plan_h2o),
    "h2o, few recent": (mmaccel.H2O(budget=10, recent=0.2), plan_h2o),
    "vatp": (mmaccel.VATP(budget=12, recent=0.25, sinks=2), plan_vatp),
    "expected-attention": (
        mmaccel.ExpectedAttention(budget=12, window=16, sinks=2), plan_expected_attention,
    ),
    "expected-attention, all queries": (
        mmaccel.ExpectedAttention(budget=12), plan_expected_attention,
    ),
    "knorm": (mmaccel.KNorm(budget=12, first_layer=1), plan_knorm),
    "keydiff": (mmaccel.KeyDiff(budget=12), plan_keydiff),
    "streaming-llm": (mmaccel.StreamingLLM(budget=12, sinks=3), plan_streaming_llm),
    "streaming-llm, no sinks": (mmaccel.StreamingLLM(budget=5, sinks=0), plan_streaming_llm),
    "morphkv": (mmaccel.MorphKV(budget=12, window=5, every=6), plan_morphkv),
    "linekv": (mmaccel.LineKV(budget=15, every=6, lines=1, sinks=3), plan_linekv),
    "linekv, two rows": (mmaccel.LineKV(budget=15, every=6, lines=2, sinks=1), plan_linekv),
    "raas": (mmaccel.RaaS(budget=27, every=6, threshold=0.06), plan_raas),
    "raas, prompts beyond the budget": (
        mmaccel.RaaS(budget=5, every=6, threshold=0.02), plan_raas,
    ),
    "kvzap": (mmaccel.KVzap(budget=4, threshold=-2.9, window=4), plan_kvzap),
    "kvzap, a higher threshold": (
        mmaccel.KVzap(budget=1, threshold=-2.2, window=6), plan_kvzap,
    ),
    "kvzip": (mmaccel.KVzip(budget=9, sinks=1, piece=10), plan_kvzip),
    "kvzip, two pieces": (mmaccel.KVzip(budget=11, sinks=0, piece=17), plan_kvzip),
    "chelsea": (mmaccel.Chelsea(budget=14, chunk=8, sinks=1, recent=3), plan_chelsea),
    "chelsea, large chunks": (
        mmaccel.Chelsea(budget=9, chunk=32, sinks=0, recent=2), plan_chelsea,
    ),
    "bilevelkv": (mmaccel.BiLevelKV(budget=15, chunk=8, pool=4, question=3), plan_bilevelkv),
    "bilevelkv, fewer than groups": (
        mmaccel.BiLevelKV(budget=9, chunk=6, pool=3, question=4), plan_bilevelkv,
    ),
    "duo-attention": (
        mmaccel.DuoAttention(budget=8, sinks=2, share=0.55, window=4), plan_duo_attention,
    ),
    "random-eviction": (mmaccel.RandomEviction(budget=12, seed=3), plan_random_eviction),
}  # fmt: skip


@dataclass
class Hiding:
    """Hides from `masked` layers what a plan evicts of one row's prompt, once it is processed."""

    method: Any
    plan: Any
    depth: int
    n_prompt: int
    plans: dict[int, Plans] = field(default_factory=dict)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.shape[2] > 1:  # the prompt
            chooser = layer - layer % self.method.shared_layers
            prompt = Prompt(query[0], key[0], value[0], layer, self.depth)
            is_own = chooser == layer
            self.plans[layer] = self.plan(prompt, self.method) if is_own else self.plans[chooser]
            return torch.zeros(1, key.shape[1], 1, key.shape[2], dtype=torch.bool)
        hidden = torch.ones(1, key.shape[1], 1, key.shape[2], dtype=torch.bool)
        hidden[..., self.n_prompt :] = False
        for head, kept in enumerate(self.plans[layer]):
            hidden[0, head, 0, kept] = False
        return hidden

    @property
    def n_kept(self) -> float:
        """Entries that a layer keeps in the mean of layers and heads."""
        heads = [len(kept) for plan in self.plans.values() for kept in plan]
        return sum(heads) / len(heads)


@dataclass
class Merging(Hiding):
    """As `Hiding`, and what stays becomes the mean of what joins it, in the model's own cache."""

    merged: set[int] = field(default_factory=set)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        hidden = super().__call__(layer, query, key, value)
        if query.shape[2] > 1 or layer in self.merged:
            return hidden
        self.merged.add(layer)
        for head, kept in enumerate(self.plans[layer]):
            joined = {i: [i] for i in kept}
            for i in set(range(self.n_prompt)) - set(kept):
                find = JOINED[self.method.name]
                owner = find(self.method, key[0, head], i, kept, self.n_prompt)
                if owner is not None:
                    joined[owner].append(i)
            for states in (key, value):
                means = {i: states[0, head, group].mean(0) for i, group in joined.items()}
                before = states[0, head].clone()
                for i, mean in means.items():
                    before[i] = mean
                states[0, head] = before
        return hidden


@dataclass
class Rounds(Hiding):
    """As `Hiding`, and again after every n tokens: what goes then is hidden n tokens later.

    By layer: queries `[Hq, T, D]`, what is hidden and what will be of each key head, and the
    attention received `[Hkv, T]`, and when an entry was attended to last.
    """

    queries: dict[int, Tensor] = field(default_factory=dict)
    hidden: dict[int, list[set[int]]] = field(default_factory=dict)
    going: dict[int, list[set[int]]] = field(default_factory=dict)
    received: dict[int, Tensor] = field(default_factory=dict)
    stamps: dict[int, Tensor] = field(default_factory=dict)
    far: dict[tuple[int, int], bool] = field(default_factory=dict)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, length = key.shape[1:3]
        if query.shape[2] > 1:  # the prompt
            seen = super().__call__(layer, query, key, value)
            self.queries[layer] = query[0]
            everything = set(range(length))
            self.hidden[layer] = [everything - set(kept) for kept in self.plans[layer]]
            self.going[layer] = [set() for _ in range(heads)]
            prompt = Prompt(query[0], key[0], value[0], layer, self.depth)
            self.received[layer] = torch.stack(prompt.votes(0))
            self.stamps[layer] = torch.full((heads, length), float("inf"))
            return seen
        n_made = length - 1 - self.n_prompt
        if n_made and n_made % self.method.every == 0:
            self.decide(layer, key[0, :, :-1], value[0, :, :-1])
        self.queries[layer] = torch.cat([self.queries[layer], query[0]], 1)
        hidden = torch.zeros(1, heads, 1, length, dtype=torch.bool)
        for head in range(heads):
            hidden[0, head, 0, list(self.hidden[layer][head])] = True
        return hidden

    def decide(self, layer: int, keys: Tensor, values: Tensor) -> None:
        heads, length = keys.shape[:2]
        groups = len(self.queries[layer]) // heads
        grown = torch.zeros(heads, length)
        grown[:, : self.received[layer].shape[1]] = self.received[layer]
        self.received[layer] = grown
        born = torch.arange(self.stamps[layer].shape[1], length) - self.n_prompt + 1.0
        self.stamps[layer] = torch.cat([self.stamps[layer], born.expand(heads, -1)], 1)
        held = []
        for head in range(heads):
            self.hidden[layer][head] |= self.going[layer][head]
            held.append([i for i in range(length) if i not in self.hidden[layer][head]])
        prompts = []
        for head, entries in enumerate(held):
            own = slice(head * groups, (head + 1) * groups)
            queries = self.queries[layer][own, entries]
            one = slice(head, head + 1)
            prompt = Prompt(queries, keys[one, entries], values[one, entries], layer, self.depth)
            (newest,) = prompt.votes(len(entries) - self.method.every)
            self.received[layer][head, entries] += newest
            self.stamp(layer, head, entries, prompt)
            received = (self.received[layer][head, entries],)
            stamps = (self.stamps[layer][head, entries],)
            far = (self.find_far(layer, head, prompt),)
            own_held = ((head, entries),)
            prompts.append(
                replace(prompt, received=received, stamps=stamps, held=own_held, is_far=far)
            )
        if layer % self.method.shared_layers:
            self.going[layer] = self.going[layer - layer % self.method.shared_layers]
            return
        if all(entries == held[0] for entries in held):  # heads may vote together
            prompts = [join_heads(prompts)]
        kept = [stays for prompt in prompts for stays in self.plan(prompt, self.method)]
        self.going[layer] = [
            set(entries) - {entries[i] for i in stays}
            for entries, stays in zip(held, kept, strict=True)
        ]

    def find_far(self, layer: int, head: int, prompt: Prompt) -> bool:
        """What a head was at its first time beyond the budget."""
        if not isinstance(self.method, mmaccel.DuoAttention):
            return False
        if self.n_prompt > self.method.budget:
            return len(self.plans[layer][head]) == self.n_prompt
        if prompt.length > self.method.budget and (layer, head) not in self.far:
            self.far[layer, head] = looks_far(prompt, 0, self.method.every, self.method)
        return self.far.get((layer, head), False)

    def stamp(self, layer: int, head: int, entries: list[int], prompt: Prompt) -> None:
        """What the entries of the last round attend to gets their time."""
        least = getattr(self.method, "threshold", 1.0)
        shares = prompt.weights(0).mean(0)
        for query in range(len(entries) - self.method.every, len(entries)):
            for i, share in enumerate(shares[query]):
                if share > least:
                    before = float(self.stamps[layer][head, entries[i]])
                    time = entries[query] - self.n_prompt + 1
                    self.stamps[layer][head, entries[i]] = max(before, time)


def test_every_cache_policy_has_a_reference() -> None:
    evicting = {
        name
        for name, entry in METHODS["kv_cache"].items()
        if issubclass(load(entry.target), CacheMethod)
    }
    assert {name.split(",")[0] for name in REFERENCES} == evicting


def takes_rounds(method: Any) -> bool:
    """Whether a method can be asked again."""
    return not method.repeated and not method.merges


# those that evict a prompt alone; what goes on is compared by `check_rounds`
ONCE = [name for name, (method, _) in REFERENCES.items() if method.every is None]
IN_ROUNDS = [name for name, (method, _) in REFERENCES.items() if takes_rounds(method)]


def first_of_each(names: Sequence[str]) -> list[Any]:
    """The first form of each method is fast."""
    return fast_first(names, lambda name: [name.split(",")[0]])


# layers between those that slide; all keys of Gemma 3 are equally long
DEEP = [("gemma3, deep", name) for name in ONCE if name != "knorm"]


def under_masks(
    model: Any, method: Any, plan_of: Callable[[Any, list[int]], Any]
) -> tuple[list[list[int]], list[Hiding]]:
    """Tokens of three rows under masks that hide what a row's plan evicts, and what was hidden."""
    every: list[Hiding] = []
    kind = Merging if method.merges else Hiding

    def hide(ids: list[int]) -> Hiding:
        every.append(kind(method, plan_of(model, ids), len(list_full(model)), len(ids)))
        return every[-1]

    return greedy_rows(model, draw_rows(*LENGTHS), hide, N_NEW), every


@cache
def under_a_mask(name: str, reference: str) -> tuple[list[list[int]], float]:
    """Tokens of three rows, and how many entries a layer keeps of them."""
    method, plan = REFERENCES[reference]

    def plan_of(model: Any, ids: list[int]) -> Any:
        return plan_kvzip(model, ids, method) if plan is plan_kvzip else plan

    tokens, every = under_masks(build_lm(name), method, plan_of)
    return tokens, sum(hides.n_kept for hides in every)


@pytest.mark.parametrize("reference", first_of_each(ONCE))
def test_eviction_is_a_mask_over_the_full_cache(reference: str) -> None:
    """Windows are narrower and wider than a prompt, and every other case is fused."""
    number = ONCE.index(reference)
    check_masked("qwen2", reference, width=(1, 5, 16)[number % 3], fused=number % 2 == 0)


@pytest.mark.parametrize(("model_name", "reference"), every(6, DEEP))
def test_eviction_of_layers_between_those_that_slide(model_name: str, reference: str) -> None:
    check_masked(model_name, reference, fused=ONCE.index(reference) % 2 == 1)


def check_masked(name: str, reference: str, *, width: int = 5, fused: bool = True) -> None:
    model, rows = build_lm(name), draw_rows(*LENGTHS)
    method, _ = REFERENCES[reference]
    policy = mmaccel.Jacobi(window=width)
    received, stats = generate(model, policy, rows, fused=fused, kv_cache=method)
    assert not torch.equal(received, whole(name))  # otherwise nothing is proven
    expected, n_kept = under_a_mask(name, reference)
    assert received.tolist() == expected
    n_entries = sum(map(len, rows))
    assert f"{math.floor(n_kept + 1e-9)} of {n_entries} cached entries" in stats.reference
    assert stats.exactness == "relaxed"


def check_masks(
    method: Any, plan_of: Callable[[Any, list[int]], Any], **options: Any
) -> tuple[list[Hiding], Any]:
    """Greedy tokens are those of `under_masks`; what was hidden, and the statistics."""
    model, policy, rows = build_lm("qwen2"), options.pop("policy"), draw_rows(*LENGTHS)
    received, stats = generate(model, policy, rows, kv_cache=method, **options)
    assert not torch.equal(received, whole("qwen2"))
    expected, every = under_masks(model, method, plan_of)
    assert received.tolist() == expected
    return every, stats


POOLING: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the group before": lambda patch: _plant(
        patch, "_add", lambda own, self, states: own(self, states).roll(1, 2)
    ),
    "the question decides nothing": lambda patch: _plant(
        patch, "score", lambda own, self, layer: own(self, layer).gt(1).float()
    ),
    "what goes is dropped": lambda patch: _plant(
        patch, "merge", lambda own, self, layer, keep: CacheMethod.merge(self, layer, keep)
    ),
}


def _plant(patch: pytest.MonkeyPatch, name: str, bug: Callable[..., Any]) -> None:
    own = getattr(mmaccel.BiLevelKV, name)
    patch.setattr(mmaccel.BiLevelKV, name, lambda *given: bug(own, *given))


@pytest.mark.parametrize("bug", POOLING)
def test_planted_bugs_of_pooling_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    POOLING[bug](monkeypatch)
    with pytest.raises(AssertionError):
        check_masked("qwen2", "bilevelkv")


# of every kind one; under all policies every method is run in `tests/matrix/test_layers.py`
SPECULATED = [
    "snapkv", "h2o, few recent", "chunkkv, layers share", "raas", "kvzap", "duo-attention",
    "chelsea",
]  # fmt: skip
# plans of one head need to know its number, or queries of entries that went
BY_POSITION = ("random-eviction", "expected-attention")
GROWING = [name for name in IN_ROUNDS if name.split(",")[0] not in BY_POSITION]


@pytest.mark.parametrize("reference", every(3, GROWING))
def test_rounds_are_a_mask_that_grows(reference: str) -> None:
    policies = mmaccel.Jacobi(window=6), mmaccel.Autoregressive()
    check_rounds(policies[GROWING.index(reference) % 2], reference)


@pytest.mark.parametrize("reference", ["chunkkv, layers share", "duo-attention"])
def test_rounds_of_layers_between_those_that_slide(reference: str) -> None:
    check_rounds(mmaccel.Jacobi(window=6), reference, "gemma3, deep")


def build_for_rounds(name: str) -> Any:
    """Padding may be generated, and its embedding of zeros would vote for all entries alike."""
    model = build_lm(name)
    model.get_input_embeddings().weight.data[PAD] = model.get_input_embeddings().weight.data[5] / 2
    return model


@cache
def under_rounds(reference: str | None, name: str) -> list[list[int]]:
    """Tokens of two rows under a mask that grows; None hides nothing."""
    model = build_for_rounds(name)
    if reference is None:
        whole, _ = generate(model, mmaccel.Autoregressive(), draw_rows(23, 9), max_new_tokens=34)
        found: list[list[int]] = whole.tolist()
        return found
    once, plan = REFERENCES[reference]
    method, depth = replace(once, every=6), len(list_full(model))
    return greedy_rows(
        model, draw_rows(23, 9), lambda ids: Rounds(method, plan, depth, len(ids)), 34
    )


def check_rounds(policy: Any, reference: str, name: str = "qwen2") -> None:
    model, rows = build_for_rounds(name), draw_rows(23, 9)
    method = replace(REFERENCES[reference][0], every=6)
    received, stats = generate(model, policy, rows, kv_cache=method, max_new_tokens=34)
    assert received.tolist() != under_rounds(None, name)
    assert received.tolist() == under_rounds(reference, name)
    assert stats.exactness == "relaxed" and repr(method) in stats.reference


def feed(method: Any, branches: int, most: int) -> Tensor:
    """Logits `[4, 40, V]` behind each of 40 given tokens of four rows.

    Passes draft up to `most` tokens; which of them are right is drawn, and the others are rejected.
    """
    model, n_tokens = build_lm("qwen2"), 40
    generator = torch.Generator().manual_seed(8)
    lengths = torch.tensor([30, 12, 30, 17])  # items 0 and 1, where there are two branches
    prompts = torch.randint(4, VOCAB, (4, 30), generator=generator)
    truth = torch.randint(4, VOCAB, (4, n_tokens + 6), generator=generator)
    window = CausalLMWindow(model)
    window.use_methods(LayerMethods(kv_cache=method), branches)
    window.reserve(4, 30 + n_tokens + most)
    window.prefill(Pass(prompts, torch.zeros(4, dtype=torch.int64), lengths=lengths))
    done = torch.zeros(4, dtype=torch.int64)
    found = torch.zeros(4, n_tokens, VOCAB)
    drawn = torch.Generator().manual_seed(most)
    while int(done.min()) < n_tokens:
        n_right = torch.randint(1, most + 1, (4,), generator=drawn)
        n_right = n_right.view(branches, -1)[:1].expand(branches, -1).flatten()
        n_right = n_right.minimum(n_tokens - done)
        at = done[:, None] + torch.arange(most)
        is_right = torch.arange(most) < n_right[:, None]
        tokens = torch.where(is_right, truth.gather(1, at), (truth.gather(1, at) + 7) % VOCAB)
        logits = window.forward(Pass(tokens, lengths + done))
        for row, n in enumerate(n_right.tolist()):
            first = int(done[row])
            found[row, first : first + n] = logits[row, :n]
        done = done + n_right
    return found


@pytest.mark.parametrize("reference", SPECULATED)
def test_speculate_reject_and_go_on(reference: str) -> None:
    check_speculation(reference, 1 + SPECULATED.index(reference) % 2)


def check_speculation(reference: str, branches: int) -> None:
    """The same as one accepted token after the other, whatever was drafted and rejected."""
    method = REFERENCES[reference][0]
    if takes_rounds(method):
        method = replace(method, every=6)
    check_feed(method, branches)


def check_feed(method: Any, branches: int, plain: Any = None) -> None:
    """Logits do not depend on what is drafted, and are others than those of the method `plain`."""
    one_by_one = feed(method, branches, 1)
    assert not torch.allclose(one_by_one, feed(plain, branches, 1), atol=1e-2)
    for most in (3, 6):
        assert torch.allclose(feed(method, branches, most), one_by_one, atol=1e-3)


def test_rows_of_an_item_share_rounds_where_their_prompts_are_equally_long() -> None:
    """Rows 0 and 2 do, rows 1 and 3 keep what they keep alone."""
    method = mmaccel.SnapKV(budget=12, window=4, every=6)
    alone, paired = feed(method, 1, 1), feed(method, 2, 1)
    assert torch.allclose(alone[[1, 3]], paired[[1, 3]], atol=1e-3)
    assert not torch.allclose(alone[0], paired[0], atol=1e-2)
    assert not torch.allclose(alone[2], paired[2], atol=1e-2)


@pytest.mark.parametrize(
    ("method", "spare"),
    [
        (mmaccel.SnapKV(budget=8, window=4, every=5), 3 * 5 + 1 + 1),  # scratch, and one unused
        # two rounds in the store, two until the next one with a window, and 2 unused
        (mmaccel.KVzap(budget=4, threshold=9.0, window=3, every=5), 4 * 5 + 2),
    ],
    ids=repr,
)
def test_rounds_bound_the_store(method: Any, spare: int) -> None:
    """However many tokens are generated."""
    model, rows = build_lm("llama"), draw_rows(40, 6)
    for n_new in (30, 55):
        window = CausalLMWindow(model)
        window.use_methods(LayerMethods(kv_cache=method))
        window.reserve(2, 40 + n_new)
        tokens = torch.tensor([rows[0], rows[1] + [0] * 34])
        lengths = torch.tensor([40, 6])
        window.prefill(Pass(tokens, torch.zeros(2, dtype=torch.int64), lengths=lengths))
        for step in range(0, n_new - 5, 3):
            window.forward(Pass(tokens[:, :5], lengths + step))
        most = 2 * 4 * 2 * 4 * 8 * (method.budget + spare)  # rows, heads, channels, float32
        assert all(layer.n_bytes <= most for layer in window.run_caches().layers)


def test_what_is_dropped_while_decoding_alone_is_reported() -> None:
    """A prompt within the budget, and an answer that is not."""
    model, rows = build_lm("llama"), draw_rows(8)
    method = mmaccel.StreamingLLM(budget=9, sinks=2, every=3)
    _, stats = generate(model, mmaccel.Autoregressive(), rows, kv_cache=method)
    assert stats.exactness == "relaxed" and "every=3" in stats.reference
    covered = replace(method, budget=99)
    _, stats = generate(model, mmaccel.Autoregressive(), rows, kv_cache=covered)
    assert stats.exactness == "bitwise" and stats.reference == ""


ROUND_BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "drafts are looked at": lambda patch: patch.setattr(
        eviction, "_get", lambda ring, end, n, own=eviction._get: own(ring, end + 1, n)
    ),
    "a window across a boundary sees everything": lambda patch: patch.setattr(
        WindowLayer, "hide", lambda *given: None
    ),
    "totals stay where they were": lambda patch: patch.setattr(
        Observed, "look", lambda self, keep: self
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", ROUND_BUGS)
def test_planted_bugs_of_rounds_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ROUND_BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError):
        for reference in ("snapkv", "h2o, few recent"):
            check_rounds(mmaccel.Autoregressive(), reference)
            check_speculation(reference, 1)


@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_of_the_whole_prompt_is_added_up_in_pieces(is_masked: bool) -> None:
    """Of two rows, one with padding in front of it, or behind it."""
    generator = torch.Generator().manual_seed(5)
    lengths, size = torch.tensor([150, 90]), 150
    keys = torch.randn(2, 2, size, 4, generator=generator)
    queries = torch.randn(2, 4, size, 4, generator=generator)
    columns = mask = None
    if is_masked:
        real = torch.arange(size) >= size - lengths[:, None]
        columns = (~real).long().argsort(dim=1, stable=True)
        mask = (torch.ones(size, size, dtype=torch.bool).tril() & real[:, None])[:, None]
    observer = Observer(mmaccel.H2O(budget=8), lengths, columns)
    observer.keep(0, queries, keys, mask=mask, scale=4**-0.5)
    total = observer.layers[0].total
    assert total is not None
    for row, length in enumerate(lengths.tolist()):
        entries = range(size - length, size) if is_masked else range(length)
        prompt = Prompt(queries[row][:, entries], keys[row][:, entries], keys[row], 0, 1)
        assert torch.allclose(total[row, :, :length], torch.stack(prompt.votes(0)), atol=1e-4)


def test_a_prompt_of_embeddings_is_not_fed_twice() -> None:
    model = build_lm("llama")
    given = inputs_of(model, draw_rows(30), True) | {"do_sample": False, "max_new_tokens": 4}
    expected = model.generate(**given)
    with falls_back(model, "more than tokens with KVzip", kv_cache=mmaccel.KVzip(budget=9)):
        assert torch.equal(model.generate(**given), expected)


def fill(layout: KVCacheLayout, keys: Tensor) -> WindowLayer:
    """A layer that holds keys and values `[R, H, S, D]`."""
    layer = WindowLayer(layout)
    positions = torch.arange(keys.shape[2]).expand(len(keys), -1)
    layout.prepare(positions, keys.shape[2])
    layer.update(keys, keys.clone())
    return layer


@pytest.mark.parametrize(
    ("bug", "seen_by"),
    [("one index too many", "h2o"), ("recent entries go", "snapkv"), ("heads are mixed up", "h2o")],
)
def test_planted_bugs_are_seen(bug: str, seen_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    EVICTION[bug](monkeypatch)
    with pytest.raises(AssertionError):
        check_masked("qwen2", seen_by)


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize(
    ("method", "reads_back"),
    [
        (mmaccel.TOVA(budget=10, every=5), True),
        (mmaccel.TOVA(budget=10, every=5), False),  # as on an accelerator
        (mmaccel.KVzap(budget=3, every=5, window=4, threshold=-2.5), True),
    ],
    ids=lambda each: type(each).__name__ if each not in (True, False) else str(each),
)
def test_rows_that_end_between_rounds_leave_the_others_as_they_are(
    method: Any, reads_back: bool, branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reads_back:
        monkeypatch.setattr(CausalLMWindow, "reads_back", False)
    lengths = (30, 18, 26, 9, 21, 28)[: 3 * branches]

    def decode(batching: ContinuousBatching | None) -> Generation:
        attention: Any = "kernel" if reads_back else "auto"
        window = CausalLMWindow(build_lm("llama"), attention=attention)
        window.use_methods(LayerMethods(kv_cache=method), branches)
        stops = torch.tensor([3, 7, 11, 18])
        prompt = make_prompt(draw_rows(*lengths), branches, batching=batching, stop_tokens=stops)
        params = SamplingParams(guidance_scale=1 + 0.5 * (branches - 1))
        noise = Noise.from_seed([0, 1, 2], 3)
        return mmaccel.Autoregressive().sample(window, prompt, 40, params=params, noise=noise)

    given: list[FinishedRow] = []
    whole = decode(None)
    decode(ContinuousBatching(3, given.append))
    assert len({len(row.tokens) for row in given}) > 1
    for row in given:
        expected = whole.tokens[row.row, : int(whole.lengths[row.row])]
        assert row.tokens.tolist() == expected.tolist()
