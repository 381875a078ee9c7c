"""The stores of all layers in one run, and what the methods of layers do to them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.model_parts import LayerCounts
from mmaccel.pipelines.hosts.layers.attention import Watcher, WindowPass
from mmaccel.pipelines.hosts.layers.drafting import DraftBlocks
from mmaccel.pipelines.hosts.layers.eviction import Eviction
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.pipelines.hosts.layers.observing import Observer
from mmaccel.pipelines.hosts.layers.packing import Packing
from mmaccel.pipelines.hosts.layers.shared_prefix import SharedPrefix
from mmaccel.pipelines.hosts.layers.sparse import BlockChooser, SparseBlocks
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout, WindowLayer, number_served, take

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.causal_lm.turning import KeyTurner
    from mmaccel.samplers.drafting.self_draft import SelfDrafting


class LayerStores:
    """The stores of a model's layers, for the rows of one run. Methods serve the layers that see
    everything; those with a sliding window keep all entries.

    Args:
        layers: one a layer; those that methods serve share `layout` until entries are cut or
            evicted.
        branches: G, guidance branches of the rows.
        windows: positions that each layer sees; None: all.
        drafts: the source by which the model drafts for itself.
        turner: moves states to other positions, for a method that asks for it.
        reads_back: whether passes may read tensors on the host.
    """

    def __init__(
        self,
        layers: Sequence[WindowLayer],
        layout: KVCacheLayout,
        methods: LayerMethods,
        branches: int = 1,
        windows: Sequence[int | None] | None = None,
        drafts: SelfDrafting | None = None,
        turner: KeyTurner | None = None,
        reads_back: bool = True,
    ) -> None:
        self.layers = layers
        self.layout = layout  # of whole prompts
        self.windows = [None] * len(layers) if windows is None else windows
        self.numbers = number_served(self.windows)
        self._lengths: Tensor | None = None  # of prompts whose last part is still to come
        self._observer: Observer | None = None  # of those
        self._n_seen = 0  # entries of those that were in passes
        self._eviction: Eviction | None = None
        # of the run once its prompt is processed: entries in fewer bits, prompts that rows share
        self.packing: Packing | None = None
        self.prefix: SharedPrefix | None = None
        self._methods = methods
        self._n_positions = layout.max_length + 1 - methods.repeated
        self._branches = branches
        self._turner = turner
        self._reads_back = reads_back
        sparse = methods.attention
        self.sparse = None if sparse is None else SparseBlocks(sparse, reads_back)
        self.drafting = None if drafts is None else DraftBlocks(drafts)

    @property
    def counts(self) -> LayerCounts:
        """What methods have left out in the run. Cost: a host synchronisation."""
        blocks = None if self.sparse is None else self.sparse.counts
        n_bytes = 0, 0  # held, and if all positions were held as they are
        if self.packing is not None and self.packing.has_packed:
            n_bytes = self.n_bytes, self.whole_bytes
        return LayerCounts(self.n_evicted, n_bytes, block_counts=blocks)

    @property
    def n_evicted(self) -> tuple[int, int]:
        """Entries that were evicted, of those that there were, over all rows of a layer."""
        return (0, 0) if self._eviction is None else self._eviction.n_evicted

    @property
    def rounds(self) -> Eviction | None:
        """Evict while tokens are generated; None before the prompt is processed."""
        eviction = self._eviction
        return None if eviction is None or not eviction.is_repeated else eviction

    @property
    def served(self) -> list[WindowLayer]:
        return [self.layers[layer] for layer in self.numbers]

    @property
    def n_bytes(self) -> int:
        """Of all keys and values that have memory; of shared ones once."""
        n_bytes = 0 if self.prefix is None else self.prefix.n_bytes
        return n_bytes + sum(layer.n_bytes for layer in self.layers)

    @property
    def layouts(self) -> list[KVCacheLayout]:
        """The layouts of all layers and that of whole prompts, each once."""
        layouts = [self.layout]
        for layer in self.layers:
            layouts += layer.layouts
        return list({id(layout): layout for layout in layouts}.values())

    def find_chooser(self, index: int | None = None) -> BlockChooser | None:
        """What chooses the blocks of a window, or of a round's draft number `index`."""
        if self.drafting is None:
            return self.sparse
        return self.drafting.verifying if index is None else self.drafting.drafting(index)

    @property
    def is_reduced(self) -> bool:
        """Whether layers hold fewer entries than positions, or some in fewer bits."""
        for layout in self.layouts:
            if layout.dropped is not None or layout.packed is not None:
                return True
        return False

    @property
    def whole_bytes(self) -> int:
        """Bytes if all positions were held as they are; 0 before the first pass."""
        n_indices = self.layout.max_rows * self._n_positions
        return sum(layer.bytes_an_index * n_indices for layer in self.layers)

    def to_positions(self, positions: Tensor) -> Tensor:
        """Positions that the model computes with, of `[R, W]` were nothing evicted."""
        moves = self._methods.rerotates
        return self.served[0].layout.to_index(positions) if moves else positions

    def prepare(
        self, indices: Tensor, reads: Tensor | None = None, stride: int | None = None
    ) -> None:
        """Prepare a pass that writes at `indices` `[R, W]` int64 where nothing was evicted. Without
        `reads` (as of `WindowPass`) the attended length is a multiple of `stride`; None: all.
        """
        if self.rounds is not None:
            self.rounds.advance(indices[:, 0])
        if self.packing is not None:
            self.packing.advance(indices)
        for layout in self.layouts:
            at = layout.to_index(indices)
            visible = layout.max_length
            if reads is not None:
                visible = reads.shape[-1]
            elif stride is not None:
                visible = -(-(int(at.max()) + 1) // stride) * stride
            layout.prepare(at, visible)

    def add_row(self, row: int, first: int, last: int) -> list[WindowLayer]:
        added = {id(layout): layout.add_row(row, first, last) for layout in self.layouts}
        return [WindowLayer(added[id(layer.layout)]) for layer in self.layers]

    def open_pass(
        self, indices: Tensor, reads: Tensor | None = None, watcher: Watcher | None = None,
        **fields: Any,
    ) -> WindowPass:  # fmt: skip
        """Prepare the stores for a pass; rounds of eviction look at one without a watcher."""
        self.prepare(indices, reads)
        start = indices[:, 0].contiguous()  # once, and not by the kernel in every layer
        watcher = self.rounds if watcher is None else watcher
        return WindowPass(start, self.windows, self.layers, reads=reads, watcher=watcher, **fields)

    def read(self, index: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[B, H, N, D]` of each layer at `[B, N]` of B rows, zeros at negative."""
        end = int(index.max()) + 1
        by_row = []
        for row, at in enumerate(index):
            pairs = self.copy_row(row, 0, end)
            by_row.append([_read(states, at) for pair in pairs for states in pair])
        both = [torch.cat(states) for states in zip(*by_row, strict=True)]
        return [*zip(both[::2], both[1::2], strict=True)]

    def copy_row(self, row: int, first: int, last: int) -> list[tuple[Tensor, Tensor]]:
        shared = () if self.prefix is None else self.prefix.read(row)
        copied = []
        for number, layer in enumerate(self.layers):
            stored = [states[row] for states in layer.held()]
            dropped = layer.layout.dropped
            before: Sequence[Tensor] = [states[:, :0] for states in stored]
            if shared and number in self.numbers:
                before = shared[self.numbers[number]]
            elif dropped is not None:  # what a layer with a sliding window does not see any more
                n_unseen = int(dropped[row])
                before = [pad(states[:, :0], (0, 0, n_unseen, 0)) for states in stored]
            n_before = before[0].shape[1]
            at = slice(max(first - n_before, 0), max(last - n_before, 0))
            keys, values = (
                torch.cat([past[:, first:last], states[:, at]], 1)
                for past, states in zip(before, stored, strict=True)
            )
            copied.append((keys, values))
        return copied

    def write_row(
        self, row: int, entries: Sequence[tuple[Tensor, Tensor]], key: Hashable = None
    ) -> None:
        prefix = self.prefix
        if key is not None:
            if prefix is None:
                device = entries[0][0].device
                none = torch.zeros(self.layout.max_rows, dtype=torch.int64, device=device)
                prefix = SharedPrefix(none)
            prefix = prefix.join(row, key, [entries[layer] for layer in self.numbers])
        elif prefix is not None:
            prefix = prefix.leave(row)
        self.prefix = prefix if prefix is not None and prefix.is_read else None
        self.layout.dropped = None if self.prefix is None else self.prefix.lengths
        shared = self.numbers if key is not None else {}
        if len(shared) == len(self.layers) or not entries:
            return
        for layout in self.layouts:
            layout.allocate()
        for number, (keys, values) in enumerate(entries):
            if number not in shared:
                self.layers[number].write_row(row, keys, values)

    def commit(self, start: Tensor, path: Tensor) -> None:
        """Keep a path of the tree that was written last. Cost: a copy of its keys and values."""
        for layer in self.layers:
            layer.commit(start, path)

    @contextmanager
    def select(self, rows: Tensor) -> Iterator[None]:
        with ExitStack() as stack:
            for layout in self.layouts:
                stack.enter_context(layout.select(rows))
            yield

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these, `[n]` int64, in their order. Cost: a copy of what they hold."""
        for layer in self.layers:
            layer.keep(rows)
        for layout in self.layouts:
            layout.keep(rows)
        if self.sparse is not None:
            self.sparse.keep(rows)
        if self.rounds is not None:
            self.rounds.keep_rows(rows)
        if self.prefix is not None:
            self.prefix = self.prefix.select(rows)

    def observe(self, lengths: Tensor) -> Observer | None:
        """What looks at a pass over prompts of `lengths` `[R]`; None: nothing is evicted."""
        method = self._methods.evictor
        return None if method is None else Observer(method, lengths)

    def end_prompt(self, lengths: Tensor, observer: Observer | None) -> None:
        """Let methods work on the prompt, of `lengths` `[R]` entries in the cache."""
        if observer is not None:
            self.evict(lengths, observer)
        quantizer = self._methods.quantizer
        if quantizer is not None:
            self.packing = Packing(quantizer, self.served, lengths, self._reads_back)
        if self.sparse is not None:
            for number, layer in enumerate(self.served):
                self.sparse.begin(number, layer, lengths)

    def observe_part(self, lengths: Tensor, width: int) -> Observer | None:
        """As `observe`, of the next `width` entries; rows have `lengths` `[R]` from there on."""
        if self._lengths is None:
            self._lengths = lengths
            self._observer = self.observe(lengths)
        self._n_seen += width
        if self._observer is not None:
            self._observer.begin(width)
        return self._observer

    def end_part(self) -> None:
        """As `end_prompt`, where the parts that were observed are whole prompts."""
        lengths = self._lengths
        assert lengths is not None, "observe_part comes first"
        if self._methods and self._n_seen < int(lengths.max()):
            return
        observer = self._observer
        self._lengths = None
        self._observer = None
        self._n_seen = 0
        self.end_prompt(lengths, observer)

    def keep_all(self, begins: Tensor) -> None:
        """As `evict`, where nothing is evicted: cache indices before a row's first are given up."""
        self.layout.dropped = begins

    def evict(self, lengths: Tensor, observer: Observer, begins: Tensor | None = None) -> None:
        method = self._methods.evictor
        assert method is not None
        turner = self._turner
        layers = list(self.numbers)
        if method.turns_queries and turner is not None:
            for number, seen in observer.layers.items():
                turn = partial(turner.turn, layers[number])
                observer.layers[number] = replace(seen, turn=turn)
        self._eviction = Eviction(method, self.served, self._branches, self._reads_back)
        kept = self._eviction.evict(lengths, observer, begins)
        if method.rerotates and turner is not None and kept:
            self._turn_keys(turner, kept)

    def _turn_keys(self, turner: KeyTurner, kept: Sequence[Tensor]) -> None:
        """Move the keys `[R, 1, K]` that stayed in all layers to their cache indices."""
        dropped = self.served[0].layout.dropped
        assert dropped is not None
        for index, layer in enumerate(self.layers):
            keys = layer.held()[0]
            if index in self.numbers:
                turner.turn_(index, keys, kept[self.numbers[index]][:, 0])
            else:  # all by as many, since attention sees differences of positions alone
                keys.copy_(turner.turn(index, keys, -dropped[:, None]))


def _read(states: Tensor, index: Tensor) -> Tensor:
    index = index.to(states.device)
    return take(states[None], index[None, None]).where((index >= 0)[:, None], 0)
