"""The contract of cache eviction: score the cached entries of a layer, keep those within a budget.

A method is a frozen dataclass with `score`; counts, recent entries, ragged rows and order are
written once, in `select`. It is asked when the prompt is in the cache, and in rounds while tokens
are generated, where `every` is given. What it keeps is moved together, and the memory of the rest
is freed. Kept keys hold the rotary positions they were made at, so that eviction is the same as a
mask that hides the evicted entries, unless a method `rerotates`.

All methods are relaxed. A decoding policy on top is as exact as it says with respect to the model
with the smaller cache: drafts are never evicted, so that no accepted token depends on them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.capabilities import Exclusions, Words
from mmaccel.checks import check_answer, within
from mmaccel.errors import OptionError
from mmaccel.kernels import dispatch
from mmaccel.kernels.choose_blocks import choose_highest
from mmaccel.kernels.column_mass import column_mass
from mmaccel.kernels.pack_group import Codes
from mmaccel.kernels.window_attention import window_attention
from mmaccel.policies import Method
from mmaccel.results import Exactness


@dataclass(frozen=True)
class CachedLayer:
    """What a method may look at of one layer.

    Shapes: **R** rows, **S** cache indices, **H** key heads, **Hq** query heads, **D** head width.

    Attributes:
        index: number of the layer, counted without those with a sliding window, which keep all.
        depth: layers of the model, counted in the same way.
        keys: `[R, H, S, D]`, rotated as they are cached.
        values: `[R, H, S, Dv]`.
        lengths: `[R]` int64, entries of each row; those behind are padding.
        queries: `[R, Hq, n, D]`, of the row's last n entries; n is the method's `observed`.
        scale: what scores are multiplied by.
        total: `[R, H, S]` float32, what a method that `accumulates`, `remembers` or has `repeated`
            asks for; else None.
        rated, stays: `[R, H, S]` float32 and bool, answers of `CacheMethod.rate` and `share_out`;
            None unless the method `reads_hidden` or `pools_layers`.
        turn: `turn(states, by)` are rotated `states` `[R, H, n, D]` at positions later by `by`
            `[n]` int64; None unless the method `turns_queries`, and where the model does not tell.
        most: entries of a row that stay at most, in captured steps, whose tensors are not read on
            the host; else None.
        asked: `[R, n]` int64, of scales, whose entries all see each other: the cache indices whose
            queries these are. None: the last ones, each of which sees up to its own.
        seen: `[R]` int64, of scales: entries that a row has had so far; None: `lengths`.
    """

    index: int
    depth: int
    keys: Tensor
    values: Tensor
    lengths: Tensor
    queries: Tensor
    scale: float
    total: Tensor | None = None
    rated: Tensor | None = None
    stays: Tensor | None = None
    turn: Callable[[Tensor, Tensor], Tensor] | None = None
    most: int | None = None
    asked: Tensor | None = None
    seen: Tensor | None = None

    @property
    def at(self) -> Tensor:
        """`[S]` int64, the cache indices."""
        return torch.arange(self.keys.shape[2], device=self.keys.device)

    def before(self, n: int) -> Tensor:
        """`[R, 1, S]` bool, the entries of a row without its last n; padding is none of them."""
        return self.at < (self.lengths - n)[:, None, None]

    def is_entry(self) -> Tensor:
        """`[R, 1, S]` bool, False for padding."""
        return self.before(0)

    def weights(self) -> Tensor:
        """`[R, H, G, n, S]` float32, the attention of each of the row's last n queries, by key
        head.
        """
        heads = self.keys.shape[1]
        packed = self.queries.unflatten(1, (heads, -1))  # [R, H, G, n, D]
        scores = (packed @ self.keys.to(packed.dtype)[:, :, None].mT).float() * self.scale
        n = packed.shape[3]
        position = self.lengths[:, None] - n + torch.arange(n, device=packed.device)  # [R, n]
        if self.asked is not None:
            position = (self.lengths[:, None] - 1).expand(-1, n)
        later = self.at > position.clamp(min=0)[..., None]  # [R, n, S]
        return scores.masked_fill(later[:, None, None], float("-inf")).softmax(-1)

    def mass(self) -> Tensor:
        """`[R, H, S]` float32, `weights` added up over G and n."""
        if self.asked is not None:
            return self.weights().sum((2, 3))
        start = self.lengths - self.queries.shape[2]
        keys = self.keys.to(self.queries.dtype)
        values = self.values.to(self.queries.dtype)
        _, lse = dispatch.run(window_attention, self.queries, keys, values, start, scale=self.scale)
        mass: Tensor = dispatch.run(column_mass, self.queries, keys, lse, start, scale=self.scale)
        return mass


def budget_above(name: str, default: int = 1024) -> Any:
    """The field of a budget that holds more than those entries whose number a field has."""
    return within(default, name, hint="a budget holds more entries than that", above_low=True)


OTHER_READS = ("trees", "step blocks", "draft canvas", "draft passes")
"""Words of passes behind a prompt that read more than the newest chain."""


@dataclass(frozen=True)
class KVCacheMethod(Method):
    """Base of all methods of caches: those that evict, and those that quantise."""

    exactness: ClassVar[Exactness] = "relaxed"
    slot = "kv_cache"

    @property
    def excludes(self) -> Exclusions:
        own_entries = "leaves each row entries of its own"
        return {
            "attentions": "leaves entries out",
            "caller's cache": "changes the cache",
            "copied entries": own_entries,
            "own chunks": "looks at a prompt when its last chunk is processed",
            "shared prompts": own_entries,
        }

    @property
    def name(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class LayerSizes:
    """What is known of a model's layers before it runs."""

    depth: int  # as in `CachedLayer`
    heads: int  # H
    channels: int  # C, of the hidden states that the attention of a layer reads

    def __str__(self) -> str:
        return f"{self.depth} layers of {self.heads} key heads over {self.channels} channels"


@dataclass(frozen=True)
class CacheMethod(KVCacheMethod, ABC):
    """Base of all methods that evict cached entries.

    Args:
        budget: entries that each row keeps in a layer; rows with fewer keep all.
        every: n, the method is asked again after every n generated tokens, so that the cache stays
            small however many there are; at least the window of the policy. What it drops then is
            attended to for n tokens more. None: it is asked once.

    Attributes:
        observed: n, how many of a row's last queries `CachedLayer.queries` has; 0 for none.
        accumulates: `CachedLayer.total` is the attention that each entry received from all of the
            prompt, added up over the query heads of a key head; it costs that attention a second
            time.
        remembers: `remember` is asked at the end of the prompt and of every round, and `total` is
            its last answer.
        reads_keys: scores depend on keys or queries. Only a method that needs none serves layers in
            which those of a prompt say nothing.
        turns_queries: `CachedLayer.turn` is wanted.
        pools_layers: layers share a budget, by `share_out`, when the prompt is in the cache.
        merges: what goes is merged into what stays, by `merge`.
        reads_hidden: `rate` is asked about the hidden states of every entry.
        repeated: n > 0, the prompt is fed a second time behind itself, n entries at a time, which
            costs a little more than the prompt; `total` is the most that an entry received from one
            of those.
        rerotates: kept keys are turned to consecutive positions, and new entries go on there. Every
            layer keeps the same entries, in all heads; the model has rotary positions.
        shared_layers: how many layers, one after the other, keep what the first of them chooses.
    """

    budget: int = within(1024, 1, hint="give the entries a row keeps")
    every: int | None = within(None, 1, 2**16, "64 suits most; None asks once", kw_only=True)

    accumulates: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    merges: ClassVar[bool] = False
    turns_queries: ClassVar[bool] = False
    pools_layers: ClassVar[bool] = False
    reads_keys: ClassVar[bool] = True

    @property
    def needs(self) -> Words:
        asked = {
            "rounds": self.every is not None,
            "uneven heads": self.is_headwise,
            "turned keys": self.rerotates,
            "hidden states": self.reads_hidden,
            "prompt keys": self.reads_keys,
            "repeated prompts": self.repeated > 0,
        }
        return frozenset({"own attention", "eviction"} | {w for w, is_so in asked.items() if is_so})

    @property
    def excludes(self) -> Exclusions:
        reasons = dict(super().excludes)
        if self.every is not None:
            reasons |= dict.fromkeys(OTHER_READS, f"evicts every {self.every} tokens")
            if self.is_headwise:
                why = "gives heads memory by what they hold, which the host reads in every round"
                reasons["captured steps"] = why
        if self.is_headwise:
            why = "leaves heads different numbers of entries; take SnapKV"
            reasons |= dict.fromkeys(set(OTHER_READS) - {"trees"}, why)
        if self.repeated:
            reasons |= dict.fromkeys(("chunked prompts", "own prompts"), "processes a prompt twice")
        return reasons

    @property
    def limits(self) -> dict[str, int]:
        """Drafts stay in the cache for a round."""
        return {} if self.every is None else {"window": self.every}

    @property
    def observed(self) -> int:
        return 0

    def observe(self, rows: int, columns: int) -> Sequence[int]:
        """Of the entries of a scale, in raster order, those whose queries are looked at."""
        return range(max(rows * columns - self.observed, 0), rows * columns)

    @property
    def repeated(self) -> int:
        return 0

    @property
    def rerotates(self) -> bool:
        return False

    @property
    def reads_hidden(self) -> bool:
        return False

    @property
    def shared_layers(self) -> int:
        return 1

    @property
    def n_recent(self) -> int:
        """How many of a row's last entries stay whatever their scores; at most the budget."""
        return min(max(self.observed, 1), self.budget)

    @abstractmethod
    def score(self, layer: CachedLayer) -> Tensor:
        """`[R, H, S]`, or `[R, 1, S]` where all heads keep the same: the highest stay."""

    def ask(self, name: str, layer: CachedLayer) -> Tensor:
        """`[R, H, S]` or `[R, 1, S]`, a layer's answer of `score` or `remember`, checked. Cost: a
        host synchronisation, which checks for NaN, unless `layer.most` is set.
        """
        shape = layer.keys.shape[:3]
        answer = getattr(self, name)(layer)
        counts = layer.is_entry() if layer.most is None else None
        check_answer(f"{self.name}.{name}", answer, shape, "float", counts=counts)
        return answer

    def merge(self, layer: CachedLayer, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[R, H, K, D]` of the entries that stay, from now on; `keep` `[R, 1 or H,
        K]` int64 has negative ones where anything may be answered.
        """
        at = keep.expand(-1, layer.keys.shape[1], -1).clamp(min=0)[..., None]
        keys = layer.keys.gather(2, at.expand(-1, -1, -1, layer.keys.shape[3]))
        values = layer.values.gather(2, at.expand(-1, -1, -1, layer.values.shape[3]))
        return keys, values

    def remember(self, layer: CachedLayer) -> Tensor:
        """`[R, H, S]` float32, what is known of the entries from now on.

        `layer.total` is what was known before: zeros for the entries of the last round, None at the
        end of the prompt. `layer.queries` are all of the last round.
        """
        mass = layer.mass()
        return mass if layer.total is None else layer.total + mass

    def rate(self, index: int, hidden: Tensor) -> Tensor:
        """`[R, H, W]` float32 of `hidden` `[R, W, C]`, what a layer's attention reads behind its
        norm.
        """
        raise NotImplementedError

    def share_out(self, scores: Tensor, lengths: Tensor) -> Tensor:
        """`[R, L, H, S]` bool, what stays in all layers, by scores of this shape; lengths `[R]`."""
        raise NotImplementedError

    @property
    def sizes(self) -> LayerSizes | None:
        """Of the model that `rate` was trained for; None where it takes states of any."""
        return None

    def count(self, layer: CachedLayer) -> Tensor:
        """`[R]` int64, how many entries of each row stay; all of a row within the budget."""
        return layer.lengths.clamp(max=self.budget)

    @property
    def is_headwise(self) -> bool:
        """Whether heads keep different numbers of entries: a child of `HeadwiseMethod`."""
        return False

    def plan(self, layer: CachedLayer, scores: Tensor) -> Tensor:
        """The entries of a layer that stay, by scores of `score`; see `select`."""
        return self.select(scores, layer.lengths, self.count(layer), layer.most)

    def select(
        self, scores: Tensor, lengths: Tensor, counts: Tensor, most: int | None = None
    ) -> Tensor:
        """The entries that stay, `[R, 1 or H, K]` int64, ascending; shorter rows end in -1.

        By scores of `score`, lengths `[R]` int64 and counts of `count`; without `most` (see
        `CachedLayer`) a host synchronisation.
        """
        size = scores.shape[2]
        check_answer(f"{self.name}.count", counts, lengths.shape, "int64")
        if most is None:
            some = counts.where(lengths > 0, 1)
            check_answer(f"{self.name}.count", some, lengths.shape, "int64", within=(1, 2**62))
        counts = counts.minimum(lengths)
        index = torch.arange(size, device=scores.device)
        ends = lengths[:, None, None]
        n_stay = counts[:, None, None]
        is_recent = index >= ends - n_stay.clamp(max=self.n_recent)
        scores = scores.masked_fill(is_recent, float("inf"))
        scores = scores.masked_fill(index >= ends, float("-inf"))  # padding
        n_kept = int(counts.max()) if most is None else most
        is_kept = choose_highest(scores, n_stay, n_kept)
        return list_entries(is_kept, n_kept)


def list_entries(is_kept: Tensor, most: int) -> Tensor:
    """The indices of entries that stay, in order, `[R, 1 or H, most]`; shorter lists end in -1."""
    size = is_kept.shape[2]
    index = torch.arange(size, device=is_kept.device)
    # those that go have index S, so that they stand behind those that stay
    kept = index.where(is_kept, size).sort(-1).values[..., :most]
    return kept.where(kept < size, -1)


def in_chunks(entries: Tensor, size: int) -> Tensor:
    """`[..., C, P]` of `[..., S]`, in chunks of P; what is missing of the last one is zero."""
    return pad(entries, (0, -entries.shape[-1] % size)).unflatten(-1, (-1, size))


def mean_of_chunks(votes: Tensor, counts: Tensor, size: int) -> Tensor:
    """The mean of each entry's chunk of `size`, `[R, H, S]` of votes `[R, H, S]`; `counts` `[R, 1,
    S]` bool says which entries have votes.
    """
    totals = in_chunks(votes.where(counts, 0), size).sum(-1)
    means = totals / in_chunks(counts.float(), size).sum(-1).clamp(min=1)
    return means.repeat_interleave(size, 2)[..., : votes.shape[2]]


@dataclass(frozen=True)
class MergingMethod(CacheMethod):
    """Base of methods under which what goes is merged into what stays, once."""

    every: None = within(None, hint="merged entries stay merged; leave it out", kw_only=True)

    merges: ClassVar[bool] = True

    def mark(self, keep: Tensor, size: int) -> Tensor:
        """`[R, H, S]` bool, the entries that stay, of the numbers that `merge` is given."""
        marked = torch.zeros(*keep.shape[:2], size + 1, dtype=torch.bool, device=keep.device)
        return marked.scatter(2, keep.where(keep >= 0, size), True)[..., :size]


@dataclass(frozen=True)
class CacheQuantizer(KVCacheMethod, ABC):
    """Base of methods that hold accepted entries in fewer bits, group by group.

    A query behind n entries of a row reads all but the newest `residual` in fewer bits, as far as
    they fill whole groups: that follows from its position, whatever was drafted.

    Args:
        group: entries that are quantised together.
        residual: the newest entries, which are read as they are.
        over: what evicts entries of the prompt before, if something does; not in rounds.
    """

    group: int = within(64, 1, 4096, "64 suits most; a window is at most that wide")
    residual: int = within(64, 1, hint="64 suits most; a window is at most that wide")
    over: CacheMethod | None = within(None, hint="give an instance such as SnapKV(budget=1024)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.over is not None and self.over.every is not None:
            raise OptionError(
                f"{self.name}.over: expected a method that is asked once, received {self.over!r}; "
                "leave its every out"
            )
        if self.over is not None and self.over.is_headwise:
            raise OptionError(
                f"{self.name}.over: expected a method under which all heads keep the same number "
                f"of entries, received {self.over!r}; take SnapKV, or None"
            )

    needs = frozenset({"own attention", "packed entries", "rounds"})
    # bits of a code, where kernels pack and unpack, as `mmaccel.kernels.pack_group` has it; not
    # inherited, as a child may pack otherwise
    code_bits: ClassVar[int | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "code_bits" not in vars(cls):
            cls.code_bits = None

    @property
    def excludes(self) -> Exclusions:
        return dict(super().excludes) | dict.fromkeys(OTHER_READS, "packs entries of a chain")

    @property
    def limits(self) -> dict[str, int]:
        """Drafts are never quantised."""
        return {"window": self.widest}

    @property
    def widest(self) -> int:
        """The widest window whose drafts are never quantised."""
        return min(self.group, self.residual)

    @property
    def parts(self) -> tuple[CacheMethod | None, ...]:
        return (self.over,)

    def count(self, lengths: Tensor) -> Tensor:
        """How many of a row's entries are in fewer bits for a query behind `lengths` `[...]`."""
        return (lengths - self.residual).clamp(min=0) // self.group * self.group

    @abstractmethod
    def pack_keys(self, keys: Tensor) -> Codes:
        """Keys `[R, H, N, P, D]` of N groups of P in fewer bits."""

    @abstractmethod
    def pack_values(self, values: Tensor) -> Codes:
        """Values `[R, H, N, P, D]` in fewer bits."""

    @abstractmethod
    def unpack(self, packed: Codes, out: Tensor) -> None:
        """Write keys or values to `out` `[R, H, N, P, D]`, any strides, of their scale's dtype."""
