"""The prompts of a batch, processed once for several ways to go on from them.

A method that keeps everything records what methods may look at: keys, values, the queries of the
last entries and, where some method wants it, the attention of all. Each side then begins with these
keys and values, and evicts by itself. Selectors that choose what a prompt's queries see have no
part in it: their prompts' passes are their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmaccel.contracts import Pass
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.causal_lm.own_prompt import OwnPrompt, PromptStates
from mmaccel.pipelines.layers.eviction import Observed, Observer
from mmaccel.pipelines.layers.methods import LayerMethods, reducing
from mmaccel.reduction.kv_cache.contract import CachedLayer, CacheMethod


def find_pass(methods: LayerMethods) -> str | None:
    """Which pass over the prompts serves methods: "adding" where the attention of all of the prompt
    is added up, which takes a pass several times as long, "plain", or None, a pass of their own.
    """
    if methods.attention is not None and methods.attention.chooses_prompts:
        return None
    if methods.repeated:  # the prompt is fed a second time
        return None
    adds = methods.evictor is not None and methods.evictor.accumulates
    return "adding" if adds else "plain"


def share_prompts(
    window: CausalLMWindow,
    prompts: Sequence[Tensor],
    sides: Sequence[LayerMethods],
    synchronise: Callable[[], object] = lambda: None,
) -> dict[str | None, SharedPrompts]:
    """The passes over prompts that several ways to go on share, by `find_pass`."""
    by_pass: dict[str, list[LayerMethods]] = {}
    for side in sides:
        name = find_pass(side)
        if name is not None:
            by_pass.setdefault(name, []).append(side)
    return {
        name: process_prompts(window, prompts, own, synchronise) for name, own in by_pass.items()
    }


@dataclass(frozen=True)
class _Recorder(CacheMethod):
    """Keeps all entries, and what other methods may look at; `seen` fills up layer by layer."""

    budget: int = 1
    n_observed: int = 0
    seen: dict[int, CachedLayer] = field(default_factory=dict, compare=False)

    @property
    def observed(self) -> int:
        """See `CacheMethod`."""
        return self.n_observed

    def score(self, layer: CachedLayer) -> Tensor:
        """Nothing matters more than anything else; see `CacheMethod.score`."""
        self.seen[layer.index] = layer
        return layer.keys.new_zeros(len(layer.keys), 1, layer.keys.shape[2])

    def count(self, layer: CachedLayer) -> Tensor:
        """See `CacheMethod.count`."""
        return layer.lengths


@dataclass(frozen=True)
class _Adder(_Recorder):
    """The same, with the attention of all of the prompt."""

    accumulates: ClassVar[bool] = True


@dataclass(frozen=True)
class SharedPrompts:
    """What the pass over R prompts of at most T entries has left.

    Attributes:
        lengths: `[R]` int64, entries of each.
        layers: those that methods serve, by number; see `CachedLayer`.
        entries: of every layer, keys and values `[R, H, S, D]`.
        seconds: of the pass.
        logits: `[R, V]`, behind the prompts.
    """

    lengths: Tensor
    layers: dict[int, CachedLayer]
    entries: list[tuple[Tensor, Tensor]]
    seconds: float
    logits: Tensor

    def begin(self, window: CausalLMWindow, methods: LayerMethods) -> None:
        """Let a window that was reserved go on from the prompts, after its methods' eviction."""
        is_whole = window.takes_whole_prompts
        lengths = self.lengths - (0 if is_whole else 1)  # the last token goes with the first pass
        width = int(lengths.max())
        mask = torch.arange(width, device=lengths.device) < lengths[:, None]
        observer = None
        if methods.evictor is not None:
            observer = self._observe(methods.evictor)
        states = PromptStates(
            [(keys[:, :, :width], values[:, :, :width]) for keys, values in self.entries],
            logits=self.logits,
            n_processed=0,
            observer=observer,
        )
        own = OwnPrompt(mask, lengths, lambda sparse: states)
        window.run_caches().take(own, states)
        window.prompt_logits = self.logits if is_whole else None

    def _observe(self, method: CacheMethod) -> Observer:
        """What a method would have seen, had it looked at the pass."""
        observer = Observer(method, self.lengths)
        for index, layer in self.layers.items():
            n = layer.queries.shape[2]
            queries = layer.queries[:, :, n - method.observed :]
            total = layer.total if method.accumulates else None
            observer.layers[index] = Observed(queries, layer.scale, total)
        return observer


@torch.no_grad()
def process_prompts(
    window: CausalLMWindow,
    prompts: Sequence[Tensor],
    sides: Sequence[LayerMethods],
    synchronise: Callable[[], object] = lambda: None,
) -> SharedPrompts:
    """Process prompts for all of `sides`.

    Args:
        window: over the model.
        prompts: ids `[T]` int64 of each, at least 2.
        sides: the methods that will go on from them.
        synchronise: waits for the device.
    """
    device = window.device
    methods = [side.evictor for side in sides if side.evictor is not None]
    n_observed = max((method.observed for method in methods), default=0)
    kind = _Adder if any(method.accumulates for method in methods) else _Recorder
    recorder = kind(n_observed=n_observed)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device, dtype=torch.int64)
    tokens = pad_sequence(list(prompts), batch_first=True).to(device)  # [R, T]
    with reducing(window, LayerMethods(kv_cache=recorder), 1):
        synchronise()
        began = time.perf_counter()
        window.reserve(len(prompts), tokens.shape[1])
        window.prefill(Pass(tokens, torch.zeros_like(lengths), lengths=lengths))
        synchronise()
        seconds = time.perf_counter() - began
        logits = window.prompt_logits
        caches = window.run_caches()
    assert logits is not None
    entries = [layer.held() for layer in caches.layers]
    for layer, number in caches.numbers.items():  # with the memory that the recorder holds anyway
        entries[layer] = recorder.seen[number].keys, recorder.seen[number].values
    return SharedPrompts(lengths, recorder.seen, entries, seconds, logits)
