"""The methods of a model's layers: what they evict, and what they attend to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mmaccel.contracts import Model
from mmaccel.model_parts import ReducedLayers
from mmaccel.reduction.kv_cache.contract import (
    CacheMethod,
    CacheQuantizer,
    KVCacheMethod,
)
from mmaccel.reduction.sparse_attention.contract import AttentionMethod
from mmaccel.results import Stats


@dataclass(frozen=True)
class LayerMethods:
    """What is done to the caches and the attention of layers; true where there is something."""

    kv_cache: KVCacheMethod | None = None
    attention: AttentionMethod | None = None

    @property
    def parts(self) -> tuple[KVCacheMethod | AttentionMethod | None, ...]:
        """Both, for `mmaccel.capabilities.explain`."""
        return self.kv_cache, self.attention

    def __bool__(self) -> bool:
        return self.kv_cache is not None or self.attention is not None

    @property
    def evictor(self) -> CacheMethod | None:
        if isinstance(self.kv_cache, CacheMethod):
            return self.kv_cache
        return None if self.quantizer is None else self.quantizer.over

    @property
    def quantizer(self) -> CacheQuantizer | None:
        return self.kv_cache if isinstance(self.kv_cache, CacheQuantizer) else None

    @property
    def slots(self) -> str:
        """The keywords of `attach` that have a method."""
        slots = {"kv_cache": self.kv_cache, "attention": self.attention}
        return " and ".join(name for name, method in slots.items() if method is not None)

    @property
    def repeated(self) -> int:
        """Entries of a prompt that are fed a second time behind it at once; 0: none are."""
        return 0 if self.evictor is None else self.evictor.repeated

    @property
    def rerotates(self) -> bool:
        """Whether kept keys are moved to the positions at which they stand in the cache."""
        return self.evictor is not None and self.evictor.rerotates

    @property
    def turns(self) -> bool:
        """Whether states are moved to other positions: kept keys, or queries that are looked at."""
        return self.evictor is not None and (self.evictor.rerotates or self.evictor.turns_queries)

    def describe(self, model: ReducedLayers) -> str:
        """The model with respect to which a policy was exact; empty where nothing was reduced."""
        inputs = []
        counts = model.layer_counts
        n_evicted, n_entries = counts.n_evicted
        evictor = self.evictor
        goes_on = self.quantizer is not None or not counts.is_of_prompt
        goes_on = goes_on or (evictor is not None and evictor.every is not None)
        if self.quantizer is not None and counts.packed_bytes[0]:
            inputs.append(f"the cached entries as {self.quantizer!r} holds them")
        elif goes_on and n_evicted:
            inputs.append(f"the cached entries that {self.kv_cache!r} keeps")
        elif n_evicted:
            kept = n_entries - n_evicted
            inputs.append(f"{kept} of {n_entries} cached entries of its prompt ({self.kv_cache!r})")
        blocks = counts.block_counts
        if self.attention is not None and (blocks is None or blocks.left_out):
            inputs.append(f"the blocks that {self.attention!r} chooses")
        return f"the model on {' and '.join(inputs)}" if inputs else ""

    def record(self, stats: Stats, model: Model) -> None:
        if not self:
            return
        assert isinstance(model, ReducedLayers)
        self.note(stats, model)
        reference = self.describe(model)
        if reference:
            stats.exactness = "relaxed"
            stats.reference = reference

    def note(self, stats: Stats, model: ReducedLayers) -> None:
        """Say where a selector chose nothing, had no effect, or where weights dominate a step."""
        counts = model.layer_counts
        n_packed, n_whole = counts.packed_bytes
        if self.quantizer is not None and n_packed:
            stats.notes.append(
                f"kv_cache: {self.quantizer.name} held keys and values of {n_whole} bytes in "
                f"{n_packed}"
            )
        step = counts.step_bytes
        is_chosen = self.attention is not None and not self.attention.chooses_prompts
        reads_less = self.evictor is not None or is_chosen
        if reads_less and step is not None and step.cache < step.weights:
            stats.notes.append(
                f"{self.slots}: weights dominate: a step reads {step.weights / 2**20:.3g} MiB of "
                f"weights and {step.cache / 2**20:.3g} MiB of keys and values; where it takes as "
                f"long as that, it is at most {step.speed_up:.2f} times as fast without these"
            )
        blocks = counts.block_counts
        if self.attention is None or blocks is None:
            return
        if self.attention.chooses_prompts and not blocks.left_out:
            stats.notes.append(f"attention: {self.attention.name} left out no block of the prompt")
        if blocks.empty:
            stats.notes.append(
                f"attention: {self.attention.name} chose no block {blocks.empty} times; the newest "
                "blocks were read"
            )


@contextmanager
def reducing(model: Model, methods: LayerMethods, branches: int) -> Iterator[None]:
    """Inside the block, runs of a model are under methods; its rows have `branches` branches."""
    if not methods:
        yield
        return
    assert isinstance(model, ReducedLayers)
    model.use_methods(methods, branches)
    try:
        yield
    finally:
        model.use_methods(LayerMethods())
