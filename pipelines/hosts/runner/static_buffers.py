"""Buffers of a token model over a key/value cache: static for CUDA graphs, selectable by row."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmaccel.capabilities import flatten
from mmaccel.contracts import Pass, TokenModel
from mmaccel.errors import ShapeError
from mmaccel.kernels import dispatch
from mmaccel.model_parts import (
    CapturedBuffers,
    CopiedEntries,
    LayerCounts,
    ReducedLayers,
    SelectedRows,
    SelfDrafts,
    TreePasses,
)
from mmaccel.pipelines.hosts.layers.attention_name import own_attention
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.pipelines.hosts.layers.stores import LayerStores
from mmaccel.samplers.arithmetic import find_product_format
from mmaccel.samplers.drafting.opened import forget_opened

_OF_OWN_PROMPTS = {"copied entries", "draft canvas", "draft passes"}


class StaticModelBuffers(
    TokenModel,
    CapturedBuffers,
    CopiedEntries,
    ReducedLayers,
    SelectedRows,
    SelfDrafts,
    TreePasses,
):
    """A token model over `LayerStores` whose buffers outlive a run; a child names its attributes in
    the class variables.

    A change that moves no parameter (an attribute, a hook, an adapter switched off) is not noticed:
    drop the graphs with `Handle.reset` or `Engine.close`.
    """

    # attributes that `reserve` sets; a later run uses them as they are
    reserved: ClassVar[tuple[str, ...]] = ("caches", "attention_reason")
    # tensors with one entry for each row, or None; every run has values of its own
    row_inputs: ClassVar[tuple[str, ...]] = ()
    constants: ClassVar[tuple[str, ...]] = ()  # tensors that no run changes
    # whether keys and values of prompts depend on their tokens alone, whatever row inputs there are
    follows_tokens: ClassVar[bool] = False
    options: ClassVar[tuple[str, ...]] = ("vocab_size", "attention")  # that captured passes have
    caches: LayerStores | None = None  # which `reserve` makes
    methods: LayerMethods = LayerMethods()  # of the caches and the attention of the layers
    branches: int = 1  # G, guidance branches of the rows

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have no cache and no step runner: `reserve` comes first, as always."""
        return vars(self) | {"caches": None, "setup": replace(self.setup, runner=None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def moved(self) -> None:
        """Drop buffers and what was computed from weights that have moved or were cast."""
        state = self.__getstate__() | {"last_states": None} | dict.fromkeys(self.row_inputs)
        vars(self).clear()
        self.__setstate__(state)
        forget_opened(self)

    @property
    def reads_back(self) -> bool:
        """Whether passes may read tensors on the host: on a CPU, unless they are captured."""
        return reads_back(self)

    @property
    def serves_later_runs(self) -> bool:
        """Not where prompts decide how long the stores are."""
        return self.methods.kv_cache is None and self.setup.prefixes is None

    @property
    def captures_prompts(self) -> bool:
        """Not where methods look at them."""
        return not self.methods

    def weights_state(self) -> Hashable:
        """Where the weights are, as the next run reads them. Cost: one visit of each."""
        return model_state(self.model)

    def graph_key(self) -> tuple[Any, Hashable, Hashable]:
        return self.model, self.weights_state(), (self.graph_options(), self.methods)

    def graph_options(self) -> Hashable:
        """What a captured pass depends on in addition to the weights."""
        return (
            type(self),
            *(getattr(self, name) for name in self.options),
            self.setup.ragged,
            *(getattr(self, name) is not None for name in self.row_inputs),
            *(find_address(getattr(self, name)) for name in self.constants),
            *torch_settings(self.device),
        )

    def reserve_static(self, rows: int, positions: int) -> dict[str, Any]:
        self.reserve(rows, positions)
        for name in self.row_inputs:
            value = getattr(self, name)
            setattr(self, name, None if value is None else self.make_static(value))
        # the entry keeps constants alive, as its graphs read them
        names = (*self.reserved, *self.row_inputs, *self.constants)
        return {name: getattr(self, name) for name in names}

    def load_static(self, buffers: dict[str, Any]) -> None:
        for name in self.row_inputs:
            value = getattr(self, name)
            static = buffers[name]
            if value is not None and value is not static:
                static.copy_(self.fit(value, static))
        for name, value in buffers.items():
            setattr(self, name, value)
        stores = self.run_caches()
        for layer in stores.layers:
            layer.clear()
        if stores.sparse is not None:
            stores.sparse.forget()

    @property
    def steps_differ(self) -> bool:
        return self.caches is not None and self.caches.rounds is not None

    def begin_step(self, width: int) -> bool:
        rounds = None if self.caches is None else self.caches.rounds
        return rounds is not None and rounds.begin_pass(width)

    def prompt_width(self, width: int) -> int:
        return width

    def make_static(self, value: Tensor) -> Tensor:
        """A static buffer for a row input, with these values in it."""
        return value.clone()

    def fit(self, own: Tensor, static: Tensor) -> Tensor:
        """A row input in the shape of the static buffer it is copied to."""
        return own

    def get_row_inputs(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in self.row_inputs}

    def select_rows(self, row_inputs: dict[str, Tensor | None], rows: Tensor | None) -> None:
        """Static buffers are written in place."""
        for name, value in row_inputs.items():
            if value is None or rows is None:
                setattr(self, name, value)
                continue
            selected = value[rows.to(value.device)]
            current = getattr(self, name)
            if current is value or current is None or len(current) != len(selected):
                setattr(self, name, selected)
            else:
                current.copy_(self.fit(selected, current))

    def prefill_rows(self, tokens: Tensor, start: Tensor, rows: Tensor) -> None:
        with self.select_inputs(rows), self.run_caches().select(rows):
            self.prefill(Pass(tokens, start))

    def keep_rows(self, rows: Tensor) -> None:
        self.run_caches().keep(rows)

    def join_rows(
        self,
        row_inputs: dict[str, Tensor | None],
        others: dict[str, Tensor | None],
        rows: Tensor,
        order: Tensor,
    ) -> dict[str, Tensor | None]:
        """What differs in length gets the longer."""
        joined: dict[str, Tensor | None] = {}
        for name, value in row_inputs.items():
            other = others[name]
            if value is None or other is None:
                joined[name] = value
                continue
            value = value[rows.to(value.device)]
            if value.shape[1:] != other.shape[1:]:
                longer = max(value, other, key=lambda states: states.shape[-1])
                value, other = self.fit(value, longer), self.fit(other, longer)
            joined[name] = torch.cat([value, other])[order.to(value.device)]
        return joined

    @contextmanager
    def select_inputs(self, rows: Tensor) -> Iterator[None]:
        of_all = self.get_row_inputs()
        try:
            for name, value in of_all.items():
                setattr(self, name, None if value is None else value[rows])
            yield
        finally:
            for name, value in of_all.items():
                setattr(self, name, value)

    def lack(self, word: str, part: Any = None) -> str:
        """What the next run's methods exclude, it lacks."""
        for method in flatten(self.methods):
            why = getattr(method, "excludes", {}).get(word)
            if why:
                return f"{method!r} {why}"
        if self.setup.prefixes is not None and word in _OF_OWN_PROMPTS:
            return "its rows read one stored prompt together; leave share_prefix out"
        if word == "copied entries" and self.row_inputs and not self.follows_tokens:
            return "keys of prompts depend on more than their tokens"
        return super().lack(word, part)

    @property
    def entries_key(self) -> Hashable:
        """It changes with the weights."""
        state = self.weights_state()
        tensors = chain(self.model.parameters(), self.model.buffers())
        n_writes = sum(tensor._version for tensor in tensors if not tensor.is_inference())
        return type(self), self.model, state, n_writes

    def copy_entries(self, row: int, first: int, last: int) -> list[tuple[Tensor, Tensor]]:
        return self.run_caches().copy_row(row, first, last)

    def write_entries(
        self, row: int, entries: Sequence[tuple[Tensor, Tensor]], key: Hashable = None
    ) -> None:
        self.run_caches().write_row(row, entries, key)

    def use_methods(self, methods: LayerMethods, branches: int = 1) -> None:
        self.methods = methods
        self.branches = branches

    @property
    def layer_counts(self) -> LayerCounts:
        return LayerCounts() if self.caches is None else self.caches.counts

    def commit(self, start: Tensor, path: Tensor) -> None:
        self.run_caches().commit(start, path)

    def run_caches(self) -> LayerStores:
        if self.caches is None:
            raise ShapeError(
                "tokens: expected a call of reserve first, received a pass; call "
                "reserve(rows, positions)"
            )
        return self.caches


def reads_back(model: TokenModel) -> bool:
    runner = model.setup.runner
    return model.device.type == "cpu" and (runner is None or not runner.is_static)


def model_state(model: nn.Module) -> Hashable:
    """Addresses of a module's parameters and buffers, its training mode and attention's name."""
    attention = own_attention(getattr(model, "config", None))
    addresses = tuple(find_address(tensor) for tensor in chain(model.parameters(), model.buffers()))
    return model.training, attention, addresses


def find_address(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a tensor without storage of its own
        address = id(tensor)
    return address, tensor.dtype, tensor.shape


def torch_settings(device: torch.device) -> tuple[Hashable, ...]:
    """Settings that decide which kernels a captured pass consists of."""
    cuda = torch.backends.cuda
    kernels = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cudnn.allow_tf32,
        find_product_format(device.type),
        torch.are_deterministic_algorithms_enabled(),
    )
    kind = device.type
    is_cast = torch.is_autocast_enabled(kind)
    stream = torch.cuda.current_stream(device).cuda_stream if kind == "cuda" else 0
    return (
        device,
        stream,
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype(kind) if is_cast else None,
        dispatch.mode(),
        dispatch.is_interpreted(),
        kernels,
    )
