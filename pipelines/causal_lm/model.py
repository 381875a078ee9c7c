"""A Hugging Face causal LM as a `TokenModel`: windows of tokens, each row at its own positions.

It serves every decoder-only model of transformers whose layers use ordinary attention, full or with
a sliding window. The model is called as it is, with explicit positions, prepared 4-D masks and the
cache of `mmaccel.pipelines.layers.store`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from mmaccel.contracts import Pass, TokenModel
from mmaccel.errors import ShapeError, UnsupportedModelError
from mmaccel.pipelines.causal_lm.compatibility import (
    check_capacity,
    check_causal_lm,
    check_mode,
    check_options,
    count_ids,
    find_device,
    find_position_limit,
    forward_parameters,
    read_weight,
)
from mmaccel.pipelines.causal_lm.own_prompt import Cut, LayerSteps, OwnPrompt
from mmaccel.pipelines.causal_lm.quantization import describe_sharing, find_activations
from mmaccel.pipelines.causal_lm.self_check import check_fused, find_layer_obstacle, find_reason
from mmaccel.pipelines.layers.attention import (
    Choices,
    Watcher,
    WindowPass,
    find_ancestors,
    find_configs,
    window_attention_in,
)
from mmaccel.pipelines.layers.eviction import Observer, evict
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.pipelines.layers.sparse import SparseBlocks
from mmaccel.pipelines.layers.store import KVCacheLayout, make_cache, make_masks
from mmaccel.pipelines.runner.compiled_passes import CompiledRun, UseCompile
from mmaccel.pipelines.runner.fused_decoder import FusedDecoder, Tables, open_fused
from mmaccel.pipelines.runner.static_buffers import StaticModelBuffers
from mmaccel.pipelines.transformers_release import CACHE, cache_argument

_CPU_STRIDE = 64


class CausalLMWindow(StaticModelBuffers, TokenModel):
    """Wraps a causal LM.

    Args:
        model: a transformers model with a language-modelling head.
        vocab_size: V, if only the first V ids count; the rest of the head is not computed.
        stride: the attended length is rounded up to a multiple of this many positions; None attends
            to all reserved positions at every pass, so that shapes are static for a given (R, W).
            By default 64 on a CPU, where the length is known without waiting, and None elsewhere.
        attention: of `forward`. "model" runs the layers' own attention under a mask, "kernel" runs
            `mmaccel.kernels.window_attention` in the layers where it can, and "auto" does so where
            that is a Triton kernel. A prompt is always prefilled under the model's own attention.
        fused: whether passes take the fused decoder (`mmaccel.pipelines.runner.fused_decoder`)
            instead of the model's own forward: True raises where it does not serve, "auto" takes it
            where it does. False by default, because it packs the model's weights, and a window does
            not unpack them; `mmaccel.pipelines.runner.engine.Engine` sets what its caller asks for.
        compile: whether the fused decoder's passes on a CPU run compiled, where that is faster, see
            `mmaccel.pipelines.runner.compiled_passes`: True tries it at once, "auto" where long
            runs will pay for it.

    Attributes:
        attention_reason: why the model's own attention runs, since `reserve`; empty where the
            kernel runs.
        route: the forward of the current run, since `choose_route`: "fused", "compiled" since a
            pass of the fused decoder ran compiled, or "model".
        route_reason: why it is the model's own; empty where it is the fused decoder.
        windows: sliding window of every layer, in positions; None where it sees everything.
        choices: collects (layer, version of the kernel) of every attention call, unless None.
        runner: carries out passes of samplers over this model; None runs them eagerly.
        recorder: receives what the passes give out; None records nothing.
        pass_options: arguments of every forward call, such as `output_hidden_states`.
        keeps_states, last_states, coarse: see `mmaccel.samplers.drafting.states.StateModel`.
        own_prompt: a prompt that the model's own prefill processes; None where `prefill` does.
        methods: what is done to the caches and the attention of its layers.
        n_evicted: entries that the run's eviction dropped, and entries that there were, over all
            rows of a layer; (0, 0) before.

    Raises:
        UnsupportedModelError: no causal LM, or one whose layers do not all use ordinary attention.
        OptionError: vocab_size outside 1..the head's, stride < 1, or another attention.
    """

    reserved = (*StaticModelBuffers.reserved, "_configs", "_positions", "_angles")
    options = (*StaticModelBuffers.options, "_stride", "route")
    needs_head: ClassVar[bool] = True  # whether logits come from the model's own head
    prompt_step: ClassVar[int] = 64  # widths of prompts on an accelerator are multiples of this

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int | None = None,
        stride: int | Literal["auto"] | None = "auto",
        attention: Literal["auto", "model", "kernel"] = "auto",
        fused: Literal["auto"] | bool = False,
        compile: UseCompile = False,
    ) -> None:
        self.windows = check_causal_lm(model)
        self.model = model
        head = model.get_output_embeddings()
        full = count_ids(head)
        check_options(vocab_size, full, stride, attention)
        self.vocab_size = full if vocab_size is None else vocab_size
        self.max_positions = find_position_limit(model)
        self._stride = stride
        parameters = forward_parameters(model)
        self.cache_argument = cache_argument(parameters) or CACHE
        has_option = "logits_to_keep" in parameters
        self._last_only: dict[str, Any] = {"logits_to_keep": 1} if has_option else {}
        self._narrow_head: str | None = None  # name of a head of which only V rows are computed
        self._n_ids = full
        has_hook = getattr(head, "_hf_hook", None) is not None  # which brings the whole head
        if self.vocab_size < full and isinstance(head, nn.Linear) and not has_hook:
            self._narrow_head = next(name for name, m in model.named_modules() if m is head)
        self._positions = 0
        self._kv_layout: KVCacheLayout | None = None
        self.attention, self.attention_reason = attention, "nothing is reserved"
        self.fused: Literal["auto"] | bool | FusedDecoder = fused
        self.compile = compile
        self.route, self.route_reason = "model", "no run has begun"
        self._decoder: FusedDecoder | None = None
        self._angles: Tables | None = None  # of the fused decoder, for the reserved positions
        self._compiled_run: CompiledRun | None = None
        self._kernel_pass: WindowPass | None = None
        self.choices: Choices | None = None
        self.pass_options: dict[str, Any] = {}
        self.own_prompt: OwnPrompt | None = None
        self.keeps_states = False
        self.last_states: Tensor | None = None
        self.coarse: Path | None = None
        self.methods = LayerMethods()
        self.n_evicted = (0, 0)
        self._branches = 1
        self._spare = 0  # cache indices beside those of positions
        self._sparse: SparseBlocks | None = None
        self._is_cut = False  # whether layers hold fewer entries than others
        self._layer_steps: LayerSteps | None = None
        self._prompt_logits: Tensor | None = None  # [R, V], until the first pass hands them over

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens; see `find_device`."""
        return find_device(self.model)

    @property
    def product_dtypes(self) -> Collection[torch.dtype]:
        """See `KVCacheLayout.product_dtypes`; empty before the first pass."""
        return () if self._kv_layout is None else self._kv_layout.product_dtypes

    @property
    def activation_format(self) -> str:
        """Number format that the model's activations are quantised to; empty for other models."""
        found = find_activations(self.model)
        return "" if found is None else found.format

    @property
    def shared_rounding(self) -> str:
        """Why the logits of a token depend on the others of its pass; empty where they do not."""
        return describe_sharing(self.model)

    def reserve(self, rows: int, positions: int) -> None:
        """Reset the cache to this size; see `mmaccel.contracts.TokenModel.reserve`.

        Passes may go beyond `positions`, as finished rows do: what they write there is lost, and
        the logits of those positions mean nothing.

        Raises:
            OptionError: more positions than the model supports, or a model in training mode
                with dropout or gradient checkpointing.
        """
        check_capacity(rows, positions, self.max_positions)
        check_mode(self.model)
        self.choose_route()
        self._configs: list[Any] = []
        self.attention_reason = find_reason(self)
        if not self.attention_reason:
            self.use_kernel(self.choices)
        elif self.methods or (self.own_prompt is not None and self.own_prompt.is_cut):
            self._configs = find_configs(self.model)
        self._positions = positions
        decoder = self._decoder
        self._angles = None if decoder is None else decoder.make_tables(max(positions, 1))
        self._kv_layout = KVCacheLayout(rows, positions + self._spare + 1)
        self._is_cut, self.n_evicted = False, (0, 0)
        self._layer_steps = None
        sparse = self.methods.attention
        self._sparse = None if sparse is None else SparseBlocks(sparse)
        self._cache = make_cache(len(self.windows), self._kv_layout)

    def __getstate__(self) -> dict[str, Any]:
        """As in `StaticModelBuffers`; the fused decoder is of this very model."""
        return super().__getstate__() | {"_decoder": None, "_compiled_run": None, "_angles": None}

    def graph_key(self) -> tuple[Any, Hashable, Hashable]:
        """As in `StaticModelBuffers`, after the forward of the run was chosen."""
        self.choose_route()
        return super().graph_key()

    def choose_route(self) -> None:
        """Choose the forward of the next run: the fused decoder or the model's own.

        A model that changed since the last run is recognised, packed and checked again.

        Raises:
            UnsupportedModelError: `fused=True` or `compile=True`, and the fused decoder does not
                serve the model.

        Cost: one visit of every module and parameter; six short passes at a model's first run.
        """
        self._decoder, self._compiled_run = None, None
        self.route_reason = self._find_unfused()
        if not self.route_reason:
            self._decoder, self.route_reason = self._find_decoder()
            option = "compile" if self.compile is True else "fused"
            if True in (self.fused, self.compile) and self._decoder is None:
                raise UnsupportedModelError(
                    f"{option}=True: expected a model that the fused decoder serves, received a "
                    f"{type(self.model).__name__} with {self.route_reason}; set {option}='auto'"
                )
        self.route = "model" if self._decoder is None else "fused"
        if self._decoder is not None:
            self._compiled_run = CompiledRun(self._decoder.compiled, self.compile)

    def _find_unfused(self) -> str:
        """What about this call needs the model's own forward; empty where nothing does."""
        own = self.own_prompt
        if self.fused is False:
            return "fused=False"
        if self.pass_options:
            return f"the call asks for {', '.join(self.pass_options)}"
        if own is not None and own.inputs:
            return "the prompt needs inputs of its own in every layer"
        if own is not None and own.has_steps:
            return "visual tokens are revived in the model's own layers"
        kind = self.device.type
        is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        return "autocast is on" if is_cast else ""

    def _find_decoder(self) -> tuple[FusedDecoder | None, str]:
        if isinstance(self.fused, FusedDecoder):
            return self.fused, ""
        check_mode(self.model)  # a self-check needs it
        found, reason = open_fused(
            self.model, self.windows, lambda decoder: check_fused(self.plain(), decoder)
        )
        if found is not None and found.head is None and self.needs_head:
            return None, found.head_reason
        return found, reason

    def use_fused(self, fused: Any, compile: Any) -> bool:
        """See `mmaccel.contracts.Model.use_fused`."""
        self.fused, self.compile = fused, compile
        return True

    @property
    def capture_obstacle(self) -> str:
        """See `mmaccel.contracts.TokenModel`."""
        own = self.own_prompt
        if own is not None and not own.is_plain:
            return "token types, or positions that do not count the tokens"
        if own is not None and own.is_cut:
            return "layers that cache fewer visual tokens than others"
        return self.methods.capture_obstacle

    def use_kernel(self, choices: Choices | None) -> None:
        """From now on `forward` runs the attention kernel and collects its calls in `choices`."""
        self._configs, self.choices = find_configs(self.model), choices
        self.attention_reason = ""

    def forward(self, entries: Pass) -> Tensor:
        """One pass; see `mmaccel.contracts.TokenModel.forward`.

        Cost: one pass, no host synchronisation on an accelerator. Under the model's own attention
        one mask `[R, 1, W, S]`, two if only some layers slide; sliding layers cache all positions.

        Raises:
            ShapeError: before `reserve`, or for another number of rows than reserved.
        """
        tokens, start = entries.tokens, entries.start
        assert start is not None
        if self._prompt_logits is None:
            return self._forward(entries)
        known, self._prompt_logits = self._prompt_logits[:, None], None
        if tokens.shape[1] == 1:
            if self.keeps_states:  # unknown
                self.last_states = known.new_zeros(*tokens.shape, self.output_matrix().shape[1])
            return known
        # the prompt's last token is in the cache
        parents = None if entries.parents is None else entries.parents[:, 1:] - 1
        rest = Pass(tokens[:, 1:], start + 1, parents=parents)
        logits = torch.cat([known, self._forward(rest, skipped=1)], 1)
        if self.last_states is not None:
            self.last_states = pad(self.last_states, (0, 0, 1, 0))  # unknown for the first entry
        return logits

    def _forward(self, entries: Pass, skipped: int = 0) -> Tensor:
        assert entries.start is not None
        tree = None if entries.parents is None else find_ancestors(entries.parents)
        this = self._open_pass(entries.start, tree=tree)
        output = self._pass(entries.tokens, entries.start, this, **self.pass_options)
        for option in self.pass_options:
            assert self.recorder is not None
            name = option.removeprefix("output_")
            self.recorder.record(name, getattr(output, name), skipped)
        logits: Tensor = output.logits  # [R, W, V]
        return logits if logits.shape[-1] < self._n_ids else logits[..., : self.vocab_size]

    @property
    def takes_trees(self) -> bool:
        """See `mmaccel.contracts.TokenModel`. Cost: as `find_layer_obstacle`."""
        return self.methods.attention is None and not self.find_layer_obstacle(self.methods)

    def make_room(self, spare: int) -> None:
        """See `mmaccel.contracts.TokenModel.make_room`."""
        self._spare = spare

    def commit(self, start: Tensor, path: Tensor) -> None:
        """See `mmaccel.contracts.TokenModel.commit`. Cost: a copy of the path's keys and values."""
        for layer in self._cache.layers:
            layer.commit(start, path)

    def _open_pass(
        self, start: Tensor, watcher: Watcher | None = None, tree: Tensor | None = None
    ) -> WindowPass | None:
        """What the layers need to know of a pass; None where they attend by themselves, under
        masks.
        """
        has_methods = self._is_cut or self._sparse is not None or watcher is not None
        has_methods = has_methods or tree is not None
        if self._layer_steps is not None:
            return None
        if self.attention_reason and not has_methods:
            return None
        if self.attention_reason and not self._configs:
            self._configs = find_configs(self.model)
        return WindowPass(
            start,
            self.windows,
            self._cache.layers,
            by_kernel=not self.attention_reason,
            choices=self.choices,
            sparse=self._sparse,
            watcher=watcher,
            tree=tree,
        )

    def find_layer_obstacle(self, methods: LayerMethods) -> str:
        """See `mmaccel.contracts.Model.find_layer_obstacle`.

        Cost: at a model's first time, a self-check of a few short passes.
        """
        for layer, span in enumerate(self.windows):
            if span is not None:
                return f"layer {layer} sees the last {span} positions alone"
        return find_layer_obstacle(self)

    def use_methods(self, methods: LayerMethods, branches: int = 1) -> None:
        """See `mmaccel.contracts.Model.use_methods`."""
        self.methods, self._branches = methods, branches

    def _evict(self, lengths: Tensor, observer: Observer) -> None:
        """Let every layer drop entries of the prompt, of which each row has `lengths` `[R]`."""
        method = self.methods.kv_cache
        assert method is not None
        evict(method, self._cache.layers, lengths, observer, self._branches)
        dropped = self._cache.layers[0].layout.dropped
        if dropped is not None:
            self._is_cut = True
            self.n_evicted = int(dropped.sum()), int(lengths.sum())

    @torch.no_grad()
    def process_prompt(self) -> int | None:
        """Process the window's own prompt; see `mmaccel.contracts.TokenModel.process_prompt`."""
        own, layout = self.own_prompt, self._kv_layout
        if own is None:
            return None
        assert layout is not None, "reserve comes first"
        states, index = own.process(), own.cache_indices()
        self._layer_steps = states.steps
        self._shorten_cache(layout, [cut for cut in states.cuts if not cut.has_holes])
        indices = {cut.first: cut.cache_indices(own.mask) for cut in states.cuts}
        for number, (keys, values) in enumerate(states.layers):
            layer = self._cache.layers[number]
            index = indices.get(number, index)
            own_layout = layer.layout
            own_layout.prepare(index[:, index.shape[1] - keys.shape[2] :], own_layout.max_length)
            layer.update(keys, values)
        self._prompt_logits = states.logits
        if states.observer is not None:
            self._evict(own.lengths, states.observer)
        return states.n_processed

    def _shorten_cache(self, layout: KVCacheLayout, cuts: Sequence[Cut]) -> None:
        """Give the layers after each cut a cache of their own length."""
        assert self.own_prompt is not None
        lengths, n_layers = self.own_prompt.lengths, len(self._cache.layers)
        firsts = [*(cut.first for cut in cuts), n_layers]
        self._is_cut = bool(cuts)
        for cut, end in zip(cuts, firsts[1:]):
            shorter = layout.shorten(lengths - cut.mask.sum(1))
            self._cache.layers[cut.first : end] = make_cache(end - cut.first, shorter).layers

    def prefill(self, entries: Pass) -> None:
        """One pass without logits; see `mmaccel.contracts.TokenModel.prefill`.

        Cost: as `forward`, without logits by the fused decoder, else with those of one position
        only, if the model can leave them out, and one row's mask for all, if `start` is one number
        expanded. The width is that of `prompt_width`: what surplus tokens write is overwritten
        before a query sees it.

        Raises:
            ShapeError: as in `forward`.
        """
        tokens, start, lengths = entries.tokens, entries.start, entries.lengths
        assert start is not None
        method, width = self.methods.kv_cache, tokens.shape[1]
        surplus = self.prompt_width(width) - width
        tokens = pad(tokens, (0, surplus)) if surplus else tokens
        if method is None:
            self._pass(tokens, start, **self._last_only)
            return
        if lengths is None:
            lengths = torch.full_like(start, width)
        observer = Observer.of_last(lengths, method.observed)
        self._pass(tokens, start, self._open_pass(start, observer), **self._last_only)
        self._evict(lengths, observer)

    def prompt_width(self, width: int) -> int:
        """The width at which a prompt is processed: on an accelerator a multiple of 64, so that
        libraries plan a few shapes and not one a prompt.
        """
        if self.device.type == "cpu" or self.own_prompt is not None or self.shared_rounding:
            return width
        return -(-width // self.prompt_step) * self.prompt_step

    @torch.no_grad()
    def _pass(
        self, tokens: Tensor, start: Tensor, this: WindowPass | None = None, **options: Any
    ) -> Any:
        layout = self._kv_layout
        if layout is None or tokens.shape[0] != layout.rows:
            expected = (
                "a call of reserve first" if layout is None else f"{layout.rows} rows as reserved"
            )
            raise ShapeError(
                f"tokens: expected {expected}, received {list(tokens.shape)}; "
                "call reserve(rows, positions)"
            )
        width = tokens.shape[1]
        positions = start[:, None] + torch.arange(width, device=start.device)  # [R, W]
        for own in self._layouts():
            own.prepare(own.to_index(positions), self._visible_length(own, start, width))
        dtype = self.model.dtype
        if this is None:
            queries = positions[:1] if start.stride(0) == 0 else positions  # one start, expanded
            masks: Any = make_masks(
                queries, layout.rows, layout.visible_length, self.windows, dtype
            )
        else:  # a mask of one zero: given none, some models synchronise to check for padding
            masks = start.new_zeros(layout.rows, 1, 1, 1, dtype=dtype)
        if this is not None and this.tree is not None:  # entries of one depth share a position
            positions = start[:, None] + this.tree.sum(-1) - 1
        with self._watched_head(), _without_cudnn(tokens.device), ExitStack() as stack:
            if this is not None:
                stack.enter_context(self._attending(this))
            if self._layer_steps is not None:
                stack.enter_context(self._layer_steps.passing(positions, layout))
            return self._run(
                input_ids=tokens,
                attention_mask=masks,
                position_ids=self.position_ids(positions),
                **{self.cache_argument: self._cache},
                use_cache=True,
                return_dict=True,
                **self._own_inputs(width),
                **options,
            )

    def _layouts(self) -> list[KVCacheLayout]:
        """The layouts of all layers, each once."""
        assert self._kv_layout is not None
        found = {id(layer.layout): layer.layout for layer in self._cache.layers}
        return list(found.values()) or [self._kv_layout]

    @contextmanager
    def _attending(self, this: WindowPass) -> Iterator[None]:
        """Inside the block, the layers attend as a pass says."""
        if self._decoder is None:
            with window_attention_in(self._configs, this):
                yield
            return
        self._kernel_pass = this
        try:
            yield
        finally:  # a prompt after a pass that failed is processed under masks
            self._kernel_pass = None

    def _own_inputs(self, width: int) -> dict[str, Tensor]:
        own = self.own_prompt
        return {} if own is None else {k: v.expand(-1, width) for k, v in own.inputs.items()}

    def position_ids(self, positions: Tensor) -> Tensor:
        """The model's position ids of cache positions `[R, W]` int64; surplus ones are clamped."""
        positions, own = positions.clamp(max=self._positions - 1), self.own_prompt
        if own is None or own.is_plain:
            return positions
        return positions + (own.next_position - own.lengths)[:, None]

    def cached_states(self, index: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values `[B, H, N, D]` of every layer at cache indices `[B, N]` of B rows.

        Zeros at negative indices.
        """
        return [layer.read(index) for layer in self._cache.layers]

    def plain(self) -> CausalLMWindow:
        """A window over the same model for self-checks: text under the model's own attention."""
        return CausalLMWindow(self.model, attention="model")

    def _visible_length(self, layout: KVCacheLayout, start: Tensor, width: int) -> int:
        """How many positions a pass reads."""
        stride = self._stride
        if self.runner is not None and self.runner.is_static:
            stride = None
        elif stride == "auto":
            stride = _CPU_STRIDE if start.device.type == "cpu" else None
        if stride is None:
            return layout.max_length
        end = int(layout.to_index(start).max()) + width
        return -(-end // stride) * stride

    @contextmanager
    def _watched_head(self) -> Iterator[None]:
        """Store what the output head reads in `last_states`, if they are wanted."""
        if not self.keeps_states or self._decoder is not None and self.needs_head:
            yield  # the fused decoder computes the head's layer itself, see `_states`
            return
        hook = self.output_head().register_forward_pre_hook(self._keep_states)
        try:
            yield
        finally:
            hook.remove()

    def _keep_states(self, head: Any, given: tuple[Tensor, ...]) -> None:
        self.last_states = given[0]

    def output_head(self) -> Any:
        """The linear layer that computes the logits."""
        return self.model.get_output_embeddings()

    def keep_states(self, wanted: bool) -> None:
        """See `mmaccel.samplers.drafting.states.StateModel.keep_states`."""
        self.keeps_states = wanted

    def output_matrix(self) -> Tensor:
        """See `mmaccel.samplers.drafting.states.StateModel.output_matrix`."""
        return read_weight(self.output_head()).to(self.device)[: self.vocab_size]

    def _run(self, **inputs: Any) -> Any:
        if self._decoder is not None:
            hidden = self._states(None, **inputs)
            if "logits_to_keep" in inputs:  # of a prompt, which `prefill` does not read
                return SimpleNamespace(logits=None)
            return SimpleNamespace(logits=self._decoder.logits(hidden, self.vocab_size))
        replaced = self._replaced_tensors()
        if not replaced:
            return self.model(**inputs)
        return functional_call(self.model, replaced, (), inputs, tie_weights=False)

    def _states(self, body: Callable[..., Any] | None, **inputs: Any) -> Tensor:
        """Hidden states `[R, W, C]` after the last norm: the fused decoder's, else `body`'s."""
        decoder = self._decoder
        if decoder is None:
            assert body is not None
            states: Tensor = body(**inputs).last_hidden_state
            return states
        embedded = inputs.get("inputs_embeds")
        hidden = decoder.forward(
            decoder.embed(inputs["input_ids"]) if embedded is None else embedded,
            inputs["position_ids"], inputs["attention_mask"], self._cache.layers,
            self._kernel_pass, self._compiled_run,
            None if self.own_prompt is not None and not self.own_prompt.is_plain else self._angles,
        )  # fmt: skip
        if self._compiled_run is not None and self._compiled_run.ran:
            self.route = "compiled"
        if self.keeps_states:
            self.last_states = hidden
        return hidden

    def _replaced_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model that a pass uses in another form, by full name."""
        if self._narrow_head is None:
            return {}
        head = self.model.get_submodule(self._narrow_head)
        replaced = {f"{self._narrow_head}.weight": head.weight[: self.vocab_size]}
        if head.bias is not None:
            replaced[f"{self._narrow_head}.bias"] = head.bias[: self.vocab_size]
        return replaced


@contextmanager
def _without_cudnn(device: torch.device) -> Iterator[None]:
    """Inside the block, masked attention does not run in cuDNN, which plans every shape anew."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
