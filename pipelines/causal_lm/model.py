"""A Hugging Face causal LM as a `TokenModel`: windows of tokens, each row at its own positions.

It serves every decoder-only model of transformers whose layers use ordinary attention, full or with
a sliding window. The model is called as it is, with explicit positions, prepared 4-D masks and the
cache of `mmaccel.pipelines.layers.store`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mmaccel.capabilities import GLOSSARY
from mmaccel.catalog import IMAGE_CODES
from mmaccel.contracts import OF_LAYERS, Pass, Route
from mmaccel.model_parts import CanvasDrafts, LayerCounts, MixedPasses, PromptPiece
from mmaccel.pipelines.causal_lm.caches import LayerCaches
from mmaccel.pipelines.causal_lm.compatibility import (
    check_capacity,
    check_mode,
    check_options,
    find_device,
    find_facts,
    find_layer_sizes,
    read_weight,
)
from mmaccel.pipelines.causal_lm.forwards import ForwardRoute, OutputHead
from mmaccel.pipelines.causal_lm.own_prompt import OwnPrompt
from mmaccel.pipelines.causal_lm.passes import WindowPasses, select_kept
from mmaccel.pipelines.causal_lm.quantization import describe_sharing, find_activations
from mmaccel.pipelines.causal_lm.self_check import find_layer_obstacle, find_reason
from mmaccel.pipelines.causal_lm.turning import KeyTurner, open_turner
from mmaccel.pipelines.layers.attention import Choices
from mmaccel.pipelines.layers.store import KVCacheLayout
from mmaccel.pipelines.runner.compiled_passes import UseCompile
from mmaccel.pipelines.runner.engine import UseFused
from mmaccel.pipelines.runner.static_buffers import StaticModelBuffers
from mmaccel.results import StepBytes
from mmaccel.samplers.drafting.states import LayerStates, PromptReader


class CausalLMWindow(StaticModelBuffers, CanvasDrafts, LayerStates, MixedPasses):
    """Wraps a causal LM.

    Its parts are facts of the model, the caches of a run, the forward that a run has chosen, and
    passes, which bring them together.

    Args:
        model: a transformers model with a language-modelling head.
        vocab_size: V, if only the first V ids count; the rest of the head is not computed.
        stride: the attended length is rounded up to a multiple of this many positions; None attends
            to all reserved positions at every pass, so that shapes are static for a given (R, W).
            "auto" is 64 on a CPU, where the length is known without waiting, and None elsewhere.
        attention: of `forward`. "model" runs the layers' own attention under a mask, "kernel" runs
            `mmaccel.kernels.window_attention` in the layers where it can, and "auto" does so where
            that is a Triton kernel. A prompt is always prefilled under the model's own attention.
        fused, compile: see `mmaccel.pipelines.runner.engine.Engine`, which sets what callers ask
            for. The fused decoder packs the model's weights, and a window does not unpack them.

    Attributes:
        route: its name is "fused", "compiled" since a pass of the fused decoder ran compiled, or
            "model".
        codes: `[V, D]`, see `TokenModel.vectors`; None where no token is a code.
        choices: collects (layer, version of the kernel) of every attention call, unless None.
        pass_options: arguments of every forward call, such as `output_hidden_states`.
        keeps_states, kept_layers, read_prompt: see `LayerStates.keep_states`.
        own_prompt: a prompt that the model's own prefill processes; None where `prefill` does.
        prompt_logits: `[R, V]` behind a prompt that was processed whole, until the first pass hands
            them over.
        facts, forwards, caches, passes: its parts; no caches before `reserve`.

    Raises:
        UnsupportedModelError: no causal LM, or one whose layers do not all use ordinary attention.
        OptionError: vocab_size outside 1..the head's, stride < 1, or another attention.
    """

    options = (*StaticModelBuffers.options, "stride")
    needs_head: ClassVar[bool] = True  # whether logits come from the model's own head
    own_vocabulary: ClassVar[bool] = False  # whether its tokens are others than the model's
    prompt_step: ClassVar[int] = 64  # widths of prompts on an accelerator are multiples of this
    caches: LayerCaches | None = None

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int | None = None,
        stride: int | Literal["auto"] | None = "auto",
        attention: Literal["auto", "model", "kernel"] = "auto",
        fused: UseFused = False,
        compile: UseCompile = False,
    ) -> None:
        self.facts = find_facts(model)
        check_options(vocab_size, self.facts.n_ids, stride, attention)
        self.model = model
        self.vocab_size = self.facts.n_ids if vocab_size is None else vocab_size
        self.max_positions = self.facts.max_positions
        self.stride: int | str | None = stride
        self.attention = attention
        self.attention_reason = "nothing is reserved"
        self.setup.fused = fused
        self.setup.compile = compile
        self.forwards = ForwardRoute(model, self.facts.windows)
        self.codes: Tensor | None = None
        self._head = OutputHead(model, self.vocab_size, self.facts.n_ids)
        self.choices: Choices | None = None
        self.pass_options: dict[str, Any] = {}
        self.own_prompt: OwnPrompt | None = None
        self.keeps_states = False
        self.kept_layers: tuple[int, ...] = ()
        self.read_prompt: PromptReader | None = None
        self.prompt_logits: Tensor | None = None
        self._prompts: LayerCaches | None = None  # until prompts that rows share are processed

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have no cache, no runner and no decoder, which is of this very model;
        `reserve` comes first, as always.
        """
        own = super().__getstate__() | {"_prompts": None}
        del own["forwards"]
        return own

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forwards = ForwardRoute(self.model, self.facts.windows)

    @property
    def passes(self) -> WindowPasses:
        """Its passes."""
        return WindowPasses(self)

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens; see `find_device`."""
        return find_device(self.model)

    @property
    def n_inputs(self) -> int:
        """See `mmaccel.contracts.TokenModel`."""
        if self.own_vocabulary:
            return self.vocab_size
        return max(self.vocab_size, self.facts.n_ids)

    @property
    def route(self) -> Route:
        """See `mmaccel.contracts.Model`."""
        activations = find_activations(self.model)
        return Route(
            self.forwards.name,
            self.forwards.reason,
            self.attention_reason,
            "" if activations is None else activations.format,
            self.forwards.same_bits,
            describe_sharing(self.model),
        )

    @property
    def is_text(self) -> bool:
        """See `mmaccel.contracts.TokenModel`."""
        return getattr(self.model.config, "model_type", None) not in IMAGE_CODES

    @property
    def takes_whole_prompts(self) -> bool:
        """See `mmaccel.contracts.TokenModel`: where entries are evicted or chosen behind a prompt,
        whose last token sees all of it, and votes.
        """
        attention = self.methods.attention
        is_chosen = attention is not None and not attention.chooses_prompts
        return is_chosen or self.methods.evictor is not None

    def plain(self) -> CausalLMWindow:
        """A window over the same model for self-checks: text under the model's own attention."""
        return CausalLMWindow(self.model, attention="model")

    def use_kernel(self, choices: Choices | None) -> None:
        """From now on `forward` runs the attention kernel and collects its calls in `choices`."""
        self.choices = choices
        self.attention_reason = ""

    offers = frozenset(GLOSSARY)

    def lack(self, word: str, part: Any = None) -> str:
        """See `mmaccel.capabilities.Capable`.

        Cost: at a model's first time, a self-check of a few short passes.
        """
        own = self.own_prompt
        if own is not None and word == "captured steps" and own.capture_obstacle:
            return own.capture_obstacle
        if own is not None and word in ("shared prompts", "copied entries", "draft canvas"):
            return "its prompt is more than ids, and its own prefill processes it"
        if word == "shared prompts" and "output_attentions" in self.pass_options:
            return "attentions of all tokens are asked for"
        if word == "layer states":
            return self._lack_of_states()
        if word == "mixed passes":
            return self._lack_of_mixing()
        if word in OF_LAYERS - {"copied entries", "fused decoder"}:
            why = self._lack_of_layers(word, part)
            if why:
                return why
        return super().lack(word, part)

    def _lack_of_mixing(self) -> str:
        if self.setup.fused == "exact":
            return "fused='exact' has the bits of the model's own attention"
        if self.methods.quantizer is not None:
            return f"{self.methods.quantizer!r} holds entries of whole prompts"
        if self.pass_options:
            return f"the call asks for {', '.join(self.pass_options)}"
        return find_layer_obstacle(self)

    def _lack_of_layers(self, word: str, part: Any) -> str:
        windows = self.facts.windows
        if None not in windows:
            return f"every layer sees the last {max(filter(None, windows))} positions alone"
        if word == "draft canvas":  # no model says what a layer that slides sees of a canvas
            for layer, span in enumerate(windows):
                if span is not None:
                    return f"layer {layer} sees the last {span} positions alone"
        if word == "turned keys":
            turner = open_turner(self.model, windows)
            if isinstance(turner, str):
                return f"{turner}; leave rerotate out"
        if word == "hidden states":
            sizes = find_layer_sizes(self.facts.config)
            sizes = replace(sizes, depth=windows.count(None))
            if part.sizes not in (None, sizes):
                return f"it has {sizes}, and {part.name} is for {part.sizes}"
        return find_layer_obstacle(self)

    @property
    def entries_key(self) -> Hashable:
        """As in `StaticModelBuffers`, after the forward of the run was chosen, which may pack the
        weights.
        """
        self.choose_route()
        return super().entries_key

    def graph_key(self) -> tuple[Any, Hashable, Hashable]:
        """As in `StaticModelBuffers`, after the forward of the run was chosen."""
        self.choose_route()
        return super().graph_key()

    def graph_options(self) -> Hashable:
        return super().graph_options(), self.forwards.name

    def choose_route(self) -> None:
        """Choose the forward of the next run: the fused decoder or the model's own.

        A model that changed since the last run is recognised, packed and checked again.

        Raises:
            UnsupportedModelError: `fused=True` or `compile=True`, and the fused decoder does not
                serve the model; `fused="exact"`, and its bits differ.

        Cost: one visit of every module and parameter; four short passes at a model's first run.
        """
        self.forwards.choose(self)

    def reserve(self, rows: int, positions: int) -> None:
        """Reset the cache to this size; see `mmaccel.contracts.TokenModel.reserve`.

        Passes may go beyond `positions`, as finished rows do: what they write there is lost, and
        the logits of those positions mean nothing.

        Raises:
            OptionError: more positions than the model supports, or a model in training mode
                with dropout or gradient checkpointing.
        """
        positions += self.methods.repeated
        check_capacity(rows, positions, self.max_positions)
        check_mode(self.model)
        self.choose_route()
        self.attention_reason = find_reason(self)
        self.prompt_logits = None
        self.caches = self._open_caches(rows, positions)
        self._prompts = None
        if self.setup.prefixes is not None:
            self._prompts = self._open_caches(len(self.setup.prefixes.rows), positions)

    def _open_caches(self, rows: int, positions: int) -> LayerCaches:
        decoder = self.forwards.decoder
        return LayerCaches(
            KVCacheLayout(rows, positions + self.setup.spare + 1),
            self.facts.windows,
            self.methods,
            branches=self._branches,
            drafts=self.setup.drafts,
            positions=positions,
            tables=None if decoder is None else decoder.make_tables(max(positions, 1)),
            turner=self._open_turner(),
            reads_back=self.reads_back,
        )

    def _open_turner(self) -> KeyTurner | None:
        """What turns keys, for a method that asks for it and a model that was not refused."""
        if not self.methods.turns:
            return None
        found = open_turner(self.model, self.facts.windows)
        return None if isinstance(found, str) else found

    @property
    def layer_counts(self) -> LayerCounts:
        """See `ReducedLayers`."""
        n_whole = 0 if self.caches is None else self.caches.whole_bytes
        if not n_whole:
            return super().layer_counts
        table = {id(weight) for weight in self.model.get_input_embeddings().parameters()}
        weights = self.model.get_decoder().parameters()
        n_read = sum(weight.nbytes for weight in weights if id(weight) not in table)
        if self.needs_head:
            head = sum(weight.nbytes for weight in self.model.get_output_embeddings().parameters())
            n_read += head * self.vocab_size // self.facts.n_ids
        return replace(super().layer_counts, step_bytes=StepBytes(n_read, n_whole))

    def run_caches(self) -> LayerCaches:
        """The caches, which `reserve` has made; raises ShapeError before."""
        return self.passes.caches()

    def forward(self, entries: Pass) -> Tensor:
        """One pass; see `mmaccel.contracts.TokenModel.forward`.

        Cost: one pass, no host synchronisation on an accelerator. Under the model's own attention
        one mask `[R, 1, W, S]`, two if only some layers slide; sliding layers cache all positions.

        Raises:
            ShapeError: before `reserve`, or for another number of rows than reserved.
        """
        return self.passes.forward(entries)

    def forward_mixed(self, entries: Pass, pieces: Sequence[PromptPiece]) -> Tensor:
        """See `MixedPasses`. Windows and pieces attend apart; all else sees one row of entries."""
        if self.prompt_logits is not None and not pieces:  # known for the first entries
            return self.forward(replace(entries, wanted=None))
        each = torch.arange(len(entries.tokens), device=entries.tokens.device)[:, None]
        each = each.expand_as(entries.tokens).flatten()
        parts = [each if entries.wanted is None else each[entries.wanted]]
        parts += [torch.full_like(piece.tokens, piece.row) for piece in pieces]
        with self._select_inputs(torch.cat(parts)):
            return self.passes.forward_mixed(entries, pieces)

    def forward_draft(self, entries: Pass, index: int) -> Tensor:
        return self.passes.forward_draft(entries, index)

    def forward_canvas(self, entries: Pass) -> Tensor:
        return self.passes.forward_canvas(entries)

    @torch.no_grad()
    def process_prompt(self) -> int | None:
        """Process the window's own prompt; see `mmaccel.contracts.TokenModel.process_prompt`."""
        return self.passes.process_prompt()

    def prefill(self, entries: Pass) -> None:
        """One pass without logits; see `mmaccel.contracts.TokenModel.prefill`.

        Cost: as `forward`, without logits or with those of one position, and with one row's mask
        for all if `start` is one number expanded. What surplus tokens of `prompt_width` write is
        overwritten before a query sees it. Where rows share prompts a pass of one row a group.
        """
        prefixes = self.setup.prefixes
        if prefixes is None or self._prompts is None:
            self.passes.prefill(entries)
            return
        whole = self.run_caches()
        first = entries.tokens.new_tensor(prefixes.first)
        own = entries.select(first)
        try:
            self.caches = self._prompts
            with self._select_inputs(first):
                self.passes.prefill(own)
        finally:
            self.caches = whole
        if int(own.indices[0, -1]) + 1 >= max(prefixes.lengths):  # the prompts end here
            whole.share(prefixes, self._prompts)
            self._prompts = None

    def prompt_width(self, width: int) -> int:
        """The width at which a prompt is processed: on an accelerator a multiple of 64, so that
        libraries plan a few shapes and not one a prompt.
        """
        if self.device.type == "cpu" or self.own_prompt is not None or describe_sharing(self.model):
            return width
        return -(-width // self.prompt_step) * self.prompt_step

    def compute(self, **inputs: Any) -> Any:
        """The output of a forward with these arguments of the model's, by the run's route."""
        decoder = self.forwards.decoder
        if decoder is None:
            return self.forwards.run_model(inputs, self._replaced_tensors())
        kept = inputs.pop("logits_to_keep", 0)
        hidden = self.passes.states(None, inputs)
        if isinstance(kept, int) and kept:  # of a prompt, behind which nothing is read
            return SimpleNamespace(logits=None)
        return SimpleNamespace(logits=decoder.logits(select_kept(hidden, kept), self.vocab_size))

    def _replaced_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model that a pass uses in another form, by full name."""
        return self._head.replaced_tensors()

    def position_ids(self, positions: Tensor) -> Tensor:
        """The model's position ids of cache positions `[R, W]` int64; surplus ones are clamped."""
        assert self.caches is not None, "reserve comes first"
        positions = positions.clamp(max=self.caches.positions - 1)
        own = self.own_prompt
        if own is None or own.is_plain:
            return positions
        return positions + (own.next_position - own.lengths)[:, None]

    def output_head(self) -> Any:
        """The linear layer that computes the logits."""
        return self.model.get_output_embeddings()

    def output_matrix(self) -> Tensor:
        """`[V, D]`, of the head."""
        return read_weight(self.output_head()).to(self.device)[: self.vocab_size]

    def input_matrix(self) -> Tensor:
        """`[V, D]`, embeddings of the tokens."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.to(self.device)[: self.vocab_size]

    def vectors(self, kind: str) -> Tensor | None:
        if kind == "codes":
            return self.codes
        return None if self.own_vocabulary else self.input_matrix()

    def _lack_of_states(self) -> str:
        if self.own_vocabulary:
            return "its tokens have embeddings and a head of their own"
        layers = getattr(self.model.get_decoder(), "layers", None)
        is_known = isinstance(layers, torch.nn.ModuleList) and len(layers) == self.n_layers
        return "" if is_known else "its decoder has no list of its layers"

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.facts.windows)

    def keep_states(
        self,
        wanted: bool,
        layers: tuple[int, ...] = (),
        read_prompt: PromptReader | None = None,
    ) -> None:
        self.keeps_states = wanted
        self.kept_layers = layers
        self.read_prompt = read_prompt
        self.last_states = None
