"""The fused decoder: a lean forward over a transformers decoder's own weights.

A layer of some 40 operations is at most ten here: queries, keys and values come from one product
with packed weights, and so do gate and up; a residual addition and the norms around it are one
operation (`add_norm`), norms of queries and keys, rotary positions and the write into the cache
another (`rope_write`), the gate of the MLP a third (`gated_act`): kernels on a GPU, elsewhere their
specifications in torch.

The model's own parameters turn into views of packed tensors (`packed_linear`) until `unpack`. Its
objects stay as they are, and its own forward still runs.

Departures: norms multiply by their weight in float32, where some models do so in their own dtype;
GELU by its tanh approximation is one operation, where some models round after each of eight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.errors import MMAccelError, describe
from mmaccel.kernels import dispatch
from mmaccel.kernels.add_norm import add_norm
from mmaccel.kernels.device_errors import is_device_error
from mmaccel.kernels.gated_act import gated_act
from mmaccel.kernels.grouped_attention import grouped_attention
from mmaccel.kernels.norm import Norm
from mmaccel.kernels.rope_write import rope_write
from mmaccel.kernels.row_product import MOST_ROWS, find_tile, row_product
from mmaccel.pipelines.hosts.layers.attention import WindowPass
from mmaccel.pipelines.hosts.layers.attention_name import own_attention
from mmaccel.pipelines.hosts.layers.store import WindowLayer
from mmaccel.pipelines.hosts.runner.attention_products import attend_eagerly, attend_with_same_bits
from mmaccel.pipelines.hosts.runner.compiled_passes import CompiledPasses, CompiledRun, takes
from mmaccel.pipelines.hosts.runner.cuda_graphs import synchronising
from mmaccel.pipelines.hosts.runner.fused_structure import (
    Attention,
    Head,
    Layer,
    Structure,
    UnknownDecoderError,
    find_decoder,
    find_hook,
    read_structure,
)
from mmaccel.pipelines.hosts.runner.onednn import Faster, Products
from mmaccel.pipelines.hosts.runner.static_buffers import find_address
from mmaccel.pipelines.hosts.runner.trial import Way, capture, find_gain
from mmaccel.samplers.compare_logits import Tolerance
from mmaccel.samplers.run_lock import in_turn

Angles = tuple[Tensor, Tensor]
Tables = dict[str, Angles]
Masks = Tensor | dict[str, Tensor]

logger = logging.getLogger("mmaccel")
_ROUNDS = 8  # of a trial
_GAIN = 1.03  # by how much it must be faster


class FusedDecoder:
    """A decoder's layers in few operations.

    Memory: only `products.reordered_bytes`; packing a layer needs its largest packed weight's.
    """

    def __init__(self, model: Any, structure: Structure) -> None:
        self._structure = structure
        self.head = structure.head  # None where the model makes logits otherwise
        self.head_reason = structure.head_reason
        self._layers = structure.layers
        self._kinds = list(dict.fromkeys(layer.kind for layer in structure.layers))
        self._implementation = own_attention(model.config)
        self.compiled = CompiledPasses(type(self).run_tensors)
        # whether trials took `row_product`, by its tile and whether passes are captured
        self.by_rows = _by_rows.setdefault(model, {})
        self._meet: Callable[[Tensor], Tensor] = _pass_on
        self.same_bits = False
        linears = []
        for layer in self._layers:
            linears += [layer.attention.qkv, layer.attention.out, layer.mlp.up, layer.mlp.down]
        if self.head is not None:
            linears.append(self.head.product)
        self.products = Products(linears, _faster.setdefault(model, {}))
        try:
            for packed in self.products.linears:
                packed.pack()
            self.products.reorder()
        except BaseException:  # no memory, or interrupted
            self.unpack()
            raise
        if self._layers[0].attention.qkv.weight.device.type == "cuda":
            torch.cuda.empty_cache()  # what the weights were in is too small for packed ones

    def use_same_bits(self, same_bits: bool) -> None:
        """Set whether a row has the same bits in passes of any width and batch, without methods of
        caches: where kernels run, with `same_bits`; on a CPU, under masks that are not compiled.
        """
        self.same_bits = same_bits
        for packed in self.products.linears:
            packed.same_bits = same_bits
        device = self._layers[0].attention.qkv.weight.device
        if same_bits and not dispatch.uses_triton(device.type):
            self.products.reorder(of_any_size=True)

    @property
    def takes_causal(self) -> bool:
        """Not where bits, or another attention of the model, are kept."""
        return not self.same_bits and self._implementation != "eager"

    def unpack(self) -> None:
        self.products.unpack()

    @property
    def linears(self) -> list[Any]:
        """The model's own modules of its layers' products."""
        of_layers = self.products.linears[: 4 * len(self._layers)]
        return [linear for packed in of_layers for linear in packed.linears]

    @contextmanager
    def meeting(self, meet: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Inside the block what each layer's attention and MLP read and answer goes through `meet`,
        in these passes and the model's own, where what is read stays.
        """

        def read(module: Any, args: tuple[Tensor, ...]) -> None:
            meet(args[0])

        def answer(module: Any, args: Any, output: Tensor) -> Tensor:
            return meet(output)

        hooks = []
        for layer in self._layers:
            for first, last in (
                (layer.attention.qkv, layer.attention.out),
                (layer.mlp.up, layer.mlp.down),
            ):
                hooks.append(first.linears[0].register_forward_pre_hook(read))
                hooks.append(last.linears[0].register_forward_hook(answer))
        self._meet = meet
        try:
            yield
        finally:
            self._meet = _pass_on
            for hook in hooks:
                hook.remove()

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._structure.embed(tokens)
        scale = self._structure.embed_scale
        return embedded if scale == 1 else embedded * scale

    def forward(
        self,
        hidden: Tensor,
        position_ids: Tensor,
        masks: Masks,
        cache: Sequence[WindowLayer],
        kernel_pass: WindowPass | None = None,
        run: CompiledRun | None = None,
        tables: Tables | None = None,
        kept: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """The hidden states `[R, W, C]` after the last norm: one pass, no host synchronisation on
        an accelerator.

        Args:
            hidden: `[R, W, C]`, embeddings of the pass's tokens.
            position_ids: `[R, W]`, or `[3, R, W]` where positions have three axes.
            masks: of `make_masks`; not read under a `kernel_pass`.
            cache: of every layer, prepared for the pass.
            kernel_pass: by which layers attend; None: under `masks`.
            run: decides which passes on a CPU run compiled; None: none.
            tables: from `make_tables`, of at least these positions; None computes the angles.
            kept: layers whose inputs `[R, W, C]` are put there; with some, nothing runs compiled.
        """
        angles = (
            self._turn(hidden, position_ids) if tables is None else _look_up(tables, position_ids)
        )
        hidden = self._enter(hidden, position_ids)
        if not self.same_bits:
            at_once = run is not None and run.mode is True
            self.products.prepare(hidden.shape[0] * hidden.shape[1], at_once=at_once)
        project_out = self._structure.project_out
        if run is not None and kernel_pass is None and not kept and takes(run, hidden, cache):
            stores = [(store.keys, store.values) for store in cache]
            index = cache[0].layout.write_index
            states = self.compiled.run(run, self, hidden, angles, masks, stores, index)
            return states if project_out is None else project_out(states)

        shape = hidden.shape
        norm, write, gate = (_choose(f, hidden) for f in (add_norm, rope_write, gated_act))

        def attend(number: int, layer: Layer, x: Tensor, qkv: Tensor) -> Tensor:
            store = cache[number]
            attention = layer.attention
            heads = qkv.view(*shape[:2], -1, attention.head_dim).transpose(1, 2)
            memory = _find_memory(store, heads[:, -attention.kv_heads :])  # keys are alike
            queries = self._turn_and_write(write, layer, qkv, angles, memory)
            queries = queries.view(*shape[:2], -1, attention.head_dim)
            if store.parts:  # which take the pass's entries from its own memory
                keys, values = (
                    states.view(*shape[:2], *states.shape[1:]).transpose(1, 2)
                    for states in memory[:2]
                )
                keys, values = store.update(keys, values)
            else:
                keys, values = store.visible()
            if kernel_pass is None:
                return self._attend(attention, queries, keys, values, _pick(masks, layer.kind))
            out = kernel_pass.attend(
                number, queries.transpose(1, 2), keys, values,
                scale=attention.scale, softcap=attention.softcap, hidden=x.view(shape),
            )  # fmt: skip
            return out.transpose(1, 2).flatten(2)

        is_looked_at = kernel_pass is not None and kernel_pass.reads_hidden
        if not is_looked_at and self._takes_row_products(hidden, run):
            states = self._run_by_rows(hidden, attend, norm, kept)
        else:
            states = self._run_layers(hidden, attend, norm, gate, kept)
        return states if project_out is None else project_out(states)

    def _turn_and_write(
        self, write: Callable[..., Tensor], layer: Layer, qkv: Tensor,
        angles: dict[str, Angles], memory: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        """Queries `[R W, Hq D]` of a layer; its keys and values are written to `memory`."""
        attention = layer.attention
        turns = angles[layer.kind] if attention.turns else (None, None)
        return write(
            qkv, *turns, *memory, interleaved=self._structure.spec.interleaved,
            grouped=attention.is_grouped, norms=attention.norms,
        )  # fmt: skip

    def _enter(self, embedded: Tensor, position_ids: Tensor) -> Tensor:
        structure = self._structure
        if structure.project_in is not None:
            embedded = structure.project_in(embedded)
        if structure.table is None:
            return embedded
        offset = structure.spec.first_position
        rows = position_ids + offset if offset else position_ids
        return embedded + F.embedding(rows, structure.table.weight)

    def run_tensors(
        self,
        hidden: Tensor,
        angles: dict[str, Angles],
        masks: Masks,
        stores: Sequence[tuple[Tensor, Tensor]],
        index: Tensor,
    ) -> Tensor:
        """The layers of `forward`, of all rows of a cache that has room, over tensors: the first
        layer's input `[R, W, C]`, angles `[R W, P]`, masks, stores `[R L, Hkv, D]`, and flat
        indices `[R W]` that are written.
        """
        rows = hidden.shape[0]
        n_rows = rows if hidden.shape[1] == 1 else None  # what code is compiled for

        def attend(number: int, layer: Layer, x: Tensor, qkv: Tensor) -> Tensor:
            mask = _pick(masks, layer.kind)
            memory = stores[number]
            queries = self._turn_and_write(rope_write, layer, qkv, angles, (*memory, index))
            queries = queries.view(*hidden.shape[:2], -1, layer.attention.head_dim)
            keys, values = (
                states.view(rows, -1, *states.shape[1:])[:, : mask.shape[-1]].transpose(1, 2)
                for states in memory
            )
            return self._attend(layer.attention, queries, keys, values, mask)

        return self._run_layers(hidden, attend, add_norm, gated_act, n_rows=n_rows)

    def _run_layers(
        self,
        hidden: Tensor,
        attend: Callable[[int, Layer, Tensor, Tensor], Tensor],
        norm: Callable[..., Any],
        gate: Callable[..., Any],
        kept: dict[int, Tensor] | None = None,
        n_rows: int | None = None,
    ) -> Tensor:
        """The states `[R, W, C]` after the last norm.

        Args:
            attend: writes keys and values of layer i, and attends: `[R, W, Hq D]` of what its
                attention reads `[R W, C]`, and of its queries, keys and values.
            norm, gate: `add_norm` and `gated_act`, or their kernels.
            n_rows: as of `PackedLinear`.
        """
        # an update is added to the stream, and both are normed, where the next layer reads them
        shape, meet = hidden.shape, self._meet
        hidden, update, post = hidden.flatten(0, 1), None, None  # [T, C]
        scale = 1.0
        norms_stream = self._structure.norms_stream

        def add(pre: Norm | None) -> tuple[Tensor, Tensor]:
            total, normed = norm(hidden, update, pre, post=post, scale=scale)
            return normed if norms_stream else total, normed

        for number, layer in enumerate(self._layers):
            hidden, x = add(layer.pre_attention)
            if kept and number in kept:
                kept[number] = hidden.view(shape)
            scale = layer.scale
            x = meet(x)
            attended = attend(number, layer, x, layer.attention.qkv(x, n_rows)).flatten(0, 1)
            update = meet(layer.attention.out(attended, n_rows))
            post = layer.post_attention
            if layer.is_parallel:
                if layer.pre_mlp is not None:
                    _, x = norm(hidden, None, layer.pre_mlp)
                update = update + meet(_run_mlp(gate, layer, meet(x), n_rows))
                continue
            hidden, x = add(layer.pre_mlp)
            update = meet(_run_mlp(gate, layer, meet(x), n_rows))
            post = layer.post_mlp
        return add(self._structure.norm)[1].view(shape)

    @property
    def has_row_products(self) -> bool:
        """Whether passes over few entries may be products in `row_product`."""
        weight = self._layers[0].attention.qkv.weight
        is_taken = weight.dtype in (torch.float32, torch.bfloat16)
        is_there = is_taken and dispatch.uses_triton(weight.device.type)
        return is_there and self._structure.takes_row_products

    def _takes_row_products(self, hidden: Tensor, run: CompiledRun | None) -> bool:
        """Whether a pass takes `row_product`: where kernels are asked for, or were faster so."""
        n_rows = hidden.shape[0] * hidden.shape[1]
        is_plain = not self.same_bits and self._meet is _pass_on
        if n_rows > MOST_ROWS or not is_plain or not self.has_row_products:
            return False
        if dispatch.mode() == "triton":
            return True
        if run is None or dispatch.is_interpreted():  # whose seconds say nothing
            return False
        key = find_tile(n_rows), run.is_captured
        if key not in self.by_rows:
            if torch.cuda.is_current_stream_capturing():
                return False
            self.by_rows[key] = self._try_row_products(hidden, run.is_captured)
        return self.by_rows[key]

    def _try_row_products(self, hidden: Tensor, is_captured: bool) -> bool:
        """Whether `row_product` is faster over all layers, with the same states, where attention
        answers its queries. Cost: 16 passes, and those that compile or are captured.
        """

        def attend(number: int, layer: Layer, x: Tensor, qkv: Tensor) -> Tensor:
            width = layer.attention.heads * layer.attention.head_dim
            return qkv[:, :width].unflatten(0, hidden.shape[:2])

        norm, gate = (_choose(f, hidden) for f in (add_norm, gated_act))
        ways: list[Way] = [
            partial(self._run_layers, hidden, attend, norm, gate),
            partial(self._run_by_rows, hidden, attend, norm),
        ]
        is_cuda = hidden.device.type == "cuda"
        with synchronising("default") if is_cuda else nullcontext():
            try:
                if is_captured:
                    ways = [capture(way, hidden.device) for way in ways]
                gain = find_gain([(ways[0], ways[1])] * _ROUNDS, Tolerance.of(hidden.dtype))
            except Exception as error:
                if is_device_error(error):
                    raise
                logger.warning("row_product: not taken, as its trial ends in a %s", describe(error))
                return False
        return gain > _GAIN

    def _run_by_rows(
        self,
        hidden: Tensor,
        attend: Callable[[int, Layer, Tensor, Tensor], Tensor],
        norm: Callable[..., Any],
        kept: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """As `_run_layers`, with four products a layer that norm, gate and add as they go."""
        shape = hidden.shape
        hidden = hidden.flatten(0, 1)
        run: Callable[..., Tensor] = dispatch.run
        multiply = partial(run, row_product)
        for number, layer in enumerate(self._layers):
            if kept and number in kept:
                kept[number] = hidden.view(shape)
            qkv, out = layer.attention.qkv, layer.attention.out
            up, down = layer.mlp.up, layer.mlp.down
            projected = multiply(hidden, qkv.weight, qkv.bias, norm=layer.pre_attention)
            attended = attend(number, layer, hidden, projected).flatten(0, 1)
            hidden = multiply(attended, out.weight, out.bias, total=hidden, scale=layer.scale)
            inner = multiply(hidden, up.weight, up.bias, norm=layer.pre_mlp, gate=layer.mlp.gate)
            hidden = multiply(inner, down.weight, down.bias, total=hidden, scale=layer.scale)
        normed: Tensor = norm(hidden, None, self._structure.norm)[1]
        return normed.view(shape)

    def make_tables(self, n_positions: int) -> Tables | None:
        """Cosines and sines `[N, P]` of positions 0 … N - 1, by kind of layer, if these tell."""
        if not self._structure.has_fixed_angles:
            return None
        weight = self._layers[0].attention.qkv.weight
        with torch.no_grad():
            return self._turn(weight[None], torch.arange(n_positions, device=weight.device)[None])

    def _turn(self, hidden: Tensor, position_ids: Tensor) -> dict[str, Angles]:
        """Cosines and sines `[T, P]` of the pass, by kind of layer."""
        structure = self._structure
        if structure.rotary is None:
            return {}
        if structure.spec.has_axes and position_ids.ndim == 2:
            position_ids = position_ids.expand(3, -1, -1)
        if structure.spec.has_kinds:
            pairs = {k: structure.rotary(hidden, position_ids, k) for k in self._kinds}
        else:
            pairs = dict.fromkeys(self._kinds[:1], structure.rotary(hidden, position_ids))
        angles = {
            kind: structure.turn_angles(cos.flatten(0, 1), sin.flatten(0, 1))
            for kind, (cos, sin) in pairs.items()
        }
        return angles if structure.spec.has_kinds else dict.fromkeys(self._kinds, *angles.values())

    def _attend(
        self, attention: Attention, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        if self.same_bits:
            return attend_with_same_bits(attention, queries, keys, values, mask)
        if self._implementation == "eager":
            return attend_eagerly(attention, queries, keys, values, mask)
        groups = attention.heads // attention.kv_heads
        on_cpu = queries.device.type == "cpu"
        if groups > 1 and not on_cpu:  # a mask keeps grouped heads off the fast kernels of GPUs
            keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        by_head = queries.transpose(1, 2)
        out = grouped_attention(by_head, keys, values, mask, scale=attention.scale)
        return out.transpose(1, 2).flatten(2)

    def logits(self, hidden: Tensor, n_ids: int) -> Tensor:
        """Logits `[R, W, n_ids]` of the first ids; hidden states where there is no `head`."""
        head = self.head
        if head is None:
            return hidden
        if n_ids == len(head.linear.weight) or self.same_bits:
            logits = head.product(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)
            return finish_logits(head, logits[..., :n_ids])
        weight = head.linear.weight[:n_ids]
        bias = head.linear.bias
        return finish_logits(head, F.linear(hidden, weight, None if bias is None else bias[:n_ids]))


def finish_logits(head: Head, logits: Tensor) -> Tensor:
    """Scale and softcap of a head."""
    if head.scale != 1:
        logits = logits * head.scale
    return logits if head.softcap is None else head.softcap * (logits / head.softcap).tanh()


def _pass_on(x: Tensor) -> Tensor:
    return x


def _look_up(tables: Tables, position_ids: Tensor) -> dict[str, Angles]:
    """Rows of the tables; kinds of layers that share one share them."""
    at = position_ids.flatten()
    by_table = dict[int, Angles]()
    for cos, sin in tables.values():
        if id(cos) not in by_table:
            by_table[id(cos)] = cos.index_select(0, at), sin.index_select(0, at)
    return {kind: by_table[id(cos)] for kind, (cos, _) in tables.items()}


def _pick(masks: Masks, kind: str) -> Tensor:
    return masks[kind] if isinstance(masks, dict) else masks


def _choose(specification: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    """A specification where only that can run: a pass on a CPU does not ask in every call."""
    if dispatch.uses_triton(x.device.type):
        return partial(dispatch.run, specification)
    return specification


def _run_mlp(gate: Callable[..., Any], layer: Layer, x: Tensor, n_rows: int | None) -> Tensor:
    up = layer.mlp.up(x, n_rows)
    between = layer.mlp.activation(up) if layer.mlp.gate is None else gate(up, layer.mlp.gate)
    return layer.mlp.down(between, n_rows)


def _find_memory(store: WindowLayer, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where a pass writes keys and values like `[R, H, W, D]`: memories `[N, H, D]`, and indices
    `[R W]`; of a store of parts, memory of the pass alone.
    """
    if store.parts:
        rows, heads, width, head_dim = states.shape
        memory = states.new_empty(2, rows * width, heads, head_dim)
        return memory[0], memory[1], torch.arange(rows * width, device=states.device)
    if not store.has_room:
        store.make_room(states, states)
    assert store.keys is not None and store.values is not None
    return store.keys, store.values, store.write_index(store.keys.device)


@dataclass(frozen=True)
class _Known:
    """A decoder in a state, or why there is none. Neither: it served, and is unpacked."""

    state: tuple[Any, ...]
    decoder: FusedDecoder | None
    reason: str


_known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
_faster: WeakKeyDictionary[Any, Faster] = WeakKeyDictionary()
_by_rows: WeakKeyDictionary[Any, dict[tuple[int, bool], bool]] = WeakKeyDictionary()


@in_turn
def open_fused(
    model: Any, windows: Sequence[int | None], check: Callable[[FusedDecoder], str]
) -> tuple[FusedDecoder | None, str]:
    """The fused decoder of a model that `find_facts` accepts, or why there is none; `check`
    compares it with the model's own forward, and returns what is wrong.

    It is read, packed and checked again where the model changed: modules, parameters that moved or
    were replaced, dtype, device, attention. Cost: one visit of every module and parameter,
    unchanged.
    """
    state = _read_state(model)
    known = _known.get(model)
    is_same = known is not None and known.state == state
    if known is not None and is_same and (known.decoder is not None or known.reason):
        if known.decoder is not None:
            known.decoder.products.reorder()
        return known.decoder, known.reason
    close_fused(model)
    decoder = None
    try:
        decoder = FusedDecoder(model, read_structure(model, windows))
        reason = "" if is_same else check(decoder)
    except UnknownDecoderError as error:
        reason = str(error)
    except BaseException as error:  # interrupted, too
        if decoder is not None:
            decoder.unpack()
        if not isinstance(error, Exception) or isinstance(error, MMAccelError):
            raise
        if is_device_error(error):
            raise
        # else the model's own forward serves
        reason = f"layers whose reading ends in a {describe(error)}"
        if isinstance(error, torch.OutOfMemoryError):  # there may be memory for the next run
            return None, reason
    if reason and decoder is not None:
        decoder.unpack()
        decoder = None
    _known[model] = _Known(_read_state(model), decoder, reason)
    return decoder, reason


@in_turn
def close_fused(model: Any, *, forget: bool = True) -> None:
    """Give a model's packed parameters storages of their own again. It is checked again before its
    next run, or, without `forget`, where it changed.
    """
    known = _known.pop(model, None)
    if known is None:
        return
    is_same = not forget and known.state == _read_state(model)
    if known.decoder is not None:
        known.decoder.unpack()
    if is_same:
        _known[model] = _Known(_read_state(model), None, known.reason)


def _read_state(model: Any) -> tuple[Any, ...]:
    decoder = find_decoder(model)
    tensors: list[Any] = []
    for part in (decoder, model.get_output_embeddings()):
        for module in part.modules() if part is not None else ():
            tensors.append((id(module), type(module)))
            for parameter in module._parameters.values():
                if parameter is not None:
                    tensors.append((id(parameter), parameter.device, find_address(parameter)))
    hook = find_hook(model)
    return (ref(decoder), own_attention(model.config), hook, tuple(tensors))
