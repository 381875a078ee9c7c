"""The blocks that each selector of the catalog chooses, one row, head, block, query at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Held:
    """A layer of one row at a pass.

    Attributes:
        method: chooses.
        keys: `[H, S, D]`, of which `end` hold something.
        queries: `[H, G, W, D]`, of the query heads that read a key head.
        end, width: entries, and how many of them the pass has written.
        begin: entries before the run's first pass.
        layer: its number.
        earlier: the layers of this pass before it.
        memory: what the layer's earlier passes have left.
        later: `memory` of the layers behind it.
    """

    method: Any
    keys: Tensor
    queries: Tensor
    end: int
    width: int
    begin: int
    layer: int = 0
    earlier: dict[int, Held] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    later: list[dict[str, Any]] = field(default_factory=list)

    @property
    def n_blocks(self) -> int:
        """Blocks that hold something."""
        return -(-self.end // self.method.block)

    @property
    def own(self) -> set[int]:
        """The blocks of the pass itself."""
        return set(range((self.end - self.width) // self.method.block, self.n_blocks))

    @property
    def n_wanted(self) -> int:
        """How many blocks the budget allows."""
        return int(torch.tensor(self.n_blocks * self.method.budget).ceil())

    def real(self, head: int, block: int) -> Tensor:
        """Keys `[n, D]` of a block."""
        size = self.method.block
        return self.keys[head, block * size : min((block + 1) * size, self.end)]

    def best(self, scores: dict[int, float], n_wanted: int | None = None) -> set[int]:
        """The blocks with the best scores; the first and the pass's own in any case."""
        kept = {0} | self.own
        n_wanted = self.n_wanted if n_wanted is None else n_wanted
        others = sorted(set(scores) - kept, key=lambda block: -scores[block])
        return kept | set(others[: max(n_wanted - len(kept), 0)])


Plan = Callable[[Held], list[set[int]]]


def bound(query: Tensor, own: Tensor) -> float:
    """Quest: no key of a block `own` `[n, D]` can score higher for a query `[D]`."""
    return float(torch.maximum(query * own.max(0).values, query * own.min(0).values).sum())


def mean(query: Tensor, own: Tensor) -> float:
    """A query against the mean key of a block."""
    return sum(float(query @ key) for key in own) / len(own)


def length_normalised(query: Tensor, own: Tensor) -> float:
    """DHSA: a query against the mean of a block `own` `[n, D]` times the root of its length."""
    return mean(query, own) * len(own) ** 0.5


def representative(query: Tensor, own: Tensor) -> float:
    """LongHeads: keys attend to keys; their mean asks for the representative."""
    scale = own.shape[1] ** -0.5
    attended = [(own @ key * scale).softmax(0) @ own for key in own]
    asking = torch.stack(attended).mean(0)
    return float(query @ ((own @ asking * scale).softmax(0) @ own))


def scored(score: Callable[[Tensor, Tensor], float]) -> Plan:
    """Blocks ranked by the best score of any query."""

    def plan(held: Held) -> list[set[int]]:
        found = []
        for head, queries in enumerate(held.queries):
            scores = {
                block: max(score(query, held.real(head, block)) for query in queries.flatten(0, 1))
                for block in range(held.n_blocks)
            }
            found.append(held.best(scores))
        return found

    return plan


def probed(held: Held) -> list[set[int]]:
    """ActQKV: the mean of a window's queries, weighted by how far each is from it."""
    every = []
    for head, queries in enumerate(held.queries):
        probes = []
        for states in queries:  # [W, D]
            middle = states.mean(0)
            variance = sum((state - middle) ** 2 for state in states) / len(states) + 1e-6
            bias = [float(((state - middle) ** 2 / variance).mean()) + 1e-6 for state in states]
            probes.append(sum(b * state for b, state in zip(bias, states)) / sum(bias))
        scores = {
            block: max(mean(probe, held.real(head, block)) for probe in probes)
            for block in range(held.n_blocks)
        }
        every.append(scores)
    n_wanted = held.n_wanted
    if held.method.by_layer:
        n_wanted = share_out(held, every)
    return [held.best(scores, n_wanted) for scores in every]


def share_out(held: Held, every: list[dict[int, float]]) -> int:
    """ActQKV's budget of a layer: its mean entropy over that of all layers, between 1/2 and 2."""
    entropies = []
    for scores in every:
        ranked = torch.tensor(list(scores.values())) * held.keys.shape[-1] ** -0.5
        weights = ranked.softmax(0)
        entropies.append(-float((weights * weights.log()).sum()) / math.log(held.n_blocks))
    known = held.memory.setdefault("entropies", [])
    known.append(sum(entropies) / len(entropies))
    if len(known) == 1:
        return held.n_wanted
    layers = [known] + [other.memory["entropies"] for other in held.earlier.values()]
    layers += [memory["entropies"] for memory in held.later if memory]
    means = [sum(layer) / len(layer) for layer in layers]
    share = min(max(means[0] / (sum(means) / len(means)), 0.5), 2.0)
    budget = torch.tensor(share) * held.method.budget
    return int((held.n_blocks * budget.clamp(max=1)).ceil())


def nucleus(held: Held) -> list[set[int]]:
    """TopP: of every query the largest weights until they have the share p."""
    method = held.method
    score = bound if method.estimate == "bounds" else mean
    kept = {0} | held.own
    found = []
    for head, queries in enumerate(held.queries):
        every = []
        for query in queries.flatten(0, 1):
            blocks = [held.real(head, block) for block in range(held.n_blocks)]
            scores = [score(query, own) * query.shape[0] ** -0.5 for own in blocks]
            sizes = [len(own) for own in blocks]
            every.append((torch.tensor(scores) + torch.tensor(sizes).log()).softmax(0))
        weights = torch.stack(every)  # [G W, N]
        largest = {block: float(weights[:, block].max()) for block in range(held.n_blocks)}
        candidates = held.best(largest)
        chosen = set(kept)
        for own in weights:
            total = sum(float(own[block]) for block in candidates)
            mass = sum(float(own[block]) for block in kept) / total
            for block in sorted(candidates - kept, key=lambda block: -float(own[block])):
                if mass >= method.p:
                    break
                chosen.add(block)
                mass += float(own[block]) / total
        found.append(chosen)
    return found


def tidal(held: Held) -> list[set[int]]:
    """TidalDecode: the highest scores of the last choosing layer."""
    method = held.method
    heads = range(len(held.keys))
    if held.layer in (method.first_layer, method.reselect):
        return [set(range(held.n_blocks)) for _ in heads]
    source = max(n for n in (method.first_layer, method.reselect) if n < held.layer)
    other = held.earlier[source]
    return scored(lambda query, own: max(float(query @ key) for key in own))(other)


def voted(held: Held) -> list[set[int]]:
    """TokenSelect: the heads' softmaxes are votes; similar queries read the same again."""
    probe = held.queries.mean(2).flatten()
    last = held.memory.get("probe")
    if last is not None and float(probe @ last / probe.norm() / last.norm()) >= (
        held.method.similarity
    ):
        held.memory["again"] = held.memory.get("again", 0) + 1
        return [held.memory["chosen"] | {0} | held.own] * len(held.keys)
    votes = torch.zeros(held.end)
    for head, queries in enumerate(held.queries):
        for query in queries.flatten(0, 1):
            scores = held.keys[head, : held.end] @ query * query.shape[0] ** -0.5
            votes += scores.softmax(0)
    scores = {block: float(own.sum()) for block, own in enumerate(votes.split(held.method.block))}
    chosen = held.best(scores)
    held.memory |= {"probe": probe, "chosen": chosen}
    return [chosen] * len(held.keys)


def descended(held: Held) -> list[set[int]]:
    """HiP: chunks are halved, and the ones with the best middle key go on."""
    size, wanted, found = held.method.block, held.n_wanted, []
    for head, queries in enumerate(held.queries):

        def score(chunk: tuple[int, int]) -> float:
            middle = min((chunk[0] + chunk[1]) * size // 2, held.end - 1)
            key = held.keys[head, middle]  # noqa: B023
            return max(float(query @ key) for query in queries.flatten(0, 1))  # noqa: B023

        edges = [n * held.n_blocks // (2 * wanted) for n in range(2 * wanted + 1)]
        chunks = [(a, b) for a, b in zip(edges, edges[1:]) if a < b]
        while True:
            chunks = sorted(chunks, key=score, reverse=True)[:wanted]
            if all(b - a == 1 for a, b in chunks):
                break
            halves = []
            for a, b in chunks:
                middle = (a + b + 1) // 2
                halves += [(a, middle), (middle, b)]
            chunks = [(a, b) for a, b in halves if a < b]
        found.append({a for a, _ in chunks} | {0} | held.own)
    return found


def nearby(held: Held) -> list[set[int]]:
    """LocalWindow: the block of every entry that is near, one entry and query at a time."""
    method = held.method
    chosen = set(held.own)
    first = held.end - held.width
    for entry in range(held.end):
        is_near = entry < method.sinks
        if method.columns:
            is_near |= entry < held.begin
        for query in range(first, held.end):
            ahead = query - entry
            if not method.columns:
                is_near |= 0 <= ahead < method.window
                continue
            for row in range(method.radius + 1):
                is_near |= abs(ahead - row * method.columns) <= method.radius
        if is_near:
            chosen.add(entry // method.block)
    return [chosen] * len(held.keys)


PLANS: dict[str, Plan] = {
    "quest": scored(bound),
    "dhsa": scored(length_normalised),
    "top-p": nucleus,
    "tidal-decode": tidal,
    "token-select": voted,
    "hip": descended,
    "act-qkv": probed,
    "long-heads": scored(representative),
    "local-window": nearby,
}


PromptPlan = Callable[[Any, Tensor, Tensor], list[list[set[int]]]]


def best_before(scores: list[float], tile: int, budget: float) -> set[int]:
    """Of the blocks up to a tile the best ones; the first and its own in any case."""
    kept = {0, tile}
    wanted = int(torch.tensor((tile + 1) * budget).ceil())
    others = sorted(set(range(tile + 1)) - kept, key=lambda block: (-scores[block], block))
    return kept | set(others[: max(wanted - len(kept), 0)])


def antidiagonals(method: Any, keys: Tensor, queries: Tensor) -> list[list[set[int]]]:
    """XAttention: sums of single products along strided antidiagonals, one by one.

    Args:
        method: chooses.
        keys: `[H, T, D]` of one row's prompt.
        queries: `[H, G, T, D]`.

    Returns:
        Of each key head and tile the blocks.
    """
    size, stride, length = method.block, method.stride, keys.shape[1]
    n_groups, n_tiles = -(-length // stride), -(-length // size)
    found = []
    for head in range(len(keys)):
        tiles: list[set[int]] = [{0, tile} for tile in range(n_tiles)]
        for states in queries[head]:
            mass = torch.zeros(n_tiles, n_tiles)
            products = states @ keys[head].T  # [T, T]
            for t in range(n_groups):
                sums = torch.zeros(t + 1)
                for u in range(t + 1):
                    for i in range(stride):
                        query, key = t * stride + stride - 1 - i, u * stride + i
                        if query < length and key < length:
                            sums[u] += products[query, key]
                weights = (sums * states.shape[1] ** -0.5 / stride).softmax(0)
                for u in range(t + 1):
                    mass[t * stride // size, u * stride // size] += weights[u]
            for tile in range(n_tiles):
                shares = (mass[tile] / mass[tile].sum()).tolist()
                chosen = {0, tile}
                total = sum(shares[block] for block in chosen)
                for block in sorted(set(range(tile + 1)) - chosen, key=lambda b: -shares[b]):
                    if total >= method.threshold:
                        break
                    chosen.add(block)
                    total += shares[block]
                tiles[tile] |= chosen
        found.append(tiles)
    return found


def tile_scores(
    method: Any, keys: Tensor, queries: Tensor, head: int, tile: int, n_blocks: int
) -> list[float]:
    """The best product of a tile's mean query with the mean keys of the first blocks."""
    size = method.block
    asking = [q[tile * size : (tile + 1) * size].mean(0) for q in queries[head]]
    found = []
    for block in range(n_blocks):
        own = keys[head, block * size : (block + 1) * size].mean(0)
        found.append(max(float(query @ own) for query in asking))
    return found


def calibrated(method: Any, keys: Tensor, queries: Tensor) -> list[list[set[int]]]:
    """MInference: the pattern of each head that keeps most of what the last queries attend to."""
    size, length = method.block, keys.shape[1]
    n_tiles = -(-length // size)
    found = []
    for head in range(len(keys)):
        attended = torch.zeros(n_tiles, n_tiles)
        for states in queries[head]:
            for query in range(max(length - method.window, 0), length):
                scores = keys[head, : query + 1] @ states[query] * keys.shape[2] ** -0.5
                for key, weight in enumerate(scores.softmax(0).tolist()):
                    attended[query // size, key // size] += weight
        patterns: list[list[set[int]]] = [[], [], []]
        for tile in range(n_tiles):
            near, lines = [], []
            for block in range(n_tiles):
                distance = tile - block
                slash = 0.0
                if distance >= 0:
                    slash = sum(float(attended[t, t - distance]) for t in range(distance, n_tiles))
                near.append(-float(abs(distance)))
                lines.append(float(attended[:, block].sum()) + slash)
            products = tile_scores(method, keys, queries, head, tile, n_tiles)
            for pattern, scores in zip(patterns, (near, lines, products)):
                pattern.append(best_before(scores, tile, method.budget))
        kept = [
            sum(float(attended[tile, block]) for tile, own in enumerate(p) for block in own)
            for p in patterns
        ]
        found.append(patterns[kept.index(max(kept))])
    return found


def chunked(method: Any, keys: Tensor, queries: Tensor) -> list[list[set[int]]]:
    """VideoChunks: the tile's chunk, the best blocks before it, and everything for a question."""
    size, length = method.block, keys.shape[1]
    n_tiles = -(-length // size)
    found = []
    for head in range(len(keys)):
        tiles = []
        for tile in range(n_tiles):
            first = tile * size // method.chunk * method.chunk // size  # block of the chunk
            scores = tile_scores(method, keys, queries, head, tile, first)
            scores += [-float("inf")] * (n_tiles - first)
            chosen = best_before(scores, tile, method.budget) | set(range(first, tile + 1))
            last = min((tile + 1) * size, length) - 1
            if last >= length - method.question:
                chosen = set(range(tile + 1))
            tiles.append(chosen)
        found.append(tiles)
    return found


PROMPT_PLANS: dict[str, PromptPlan] = {
    "x-attention": antidiagonals,
    "m-inference": calibrated,
    "video-chunks": chunked,
}


def choose_by_hand(name: str, held: Held) -> list[set[int]]:
    """The blocks of every key head that a selector of the catalog reads."""
    held_now = set(range(held.n_blocks))  # a rollback may have taken some of them
    return [(chosen | held.own) & held_now for chosen in PLANS[name](held)]
