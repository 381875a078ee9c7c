"""A Hugging Face causal LM as a `TokenModel`: windows of tokens, each row at its own positions.

It serves decoder-only models of transformers whose layers use ordinary attention, full or with a
sliding window, called as they are, with explicit positions, 4-D masks and a cache of ours.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.capabilities import GLOSSARY
from mmaccel.catalog import IMAGE_CODES
from mmaccel.contracts import Pass, PromptCost, Route
from mmaccel.errors import ShapeError
from mmaccel.model_parts import CanvasDrafts, LayerCounts, MixedPasses, PromptPiece
from mmaccel.pipelines.hosts.causal_lm.caches import count_step_bytes, open_stores, take_prompt
from mmaccel.pipelines.hosts.causal_lm.compatibility import (
    ModelFacts,
    check_capacity,
    check_mode,
    check_options,
    find_device,
    find_facts,
    name_head,
    take_rows,
)
from mmaccel.pipelines.hosts.causal_lm.entries import (
    find_positions,
    is_exact,
    make_pass_masks,
    open_pass,
)
from mmaccel.pipelines.hosts.causal_lm.lacks import find_lack
from mmaccel.pipelines.hosts.causal_lm.other_passes import run_canvas, run_mixed
from mmaccel.pipelines.hosts.causal_lm.own_prompt import OwnPrompt
from mmaccel.pipelines.hosts.causal_lm.prompts import prefill_shared, run_prompt
from mmaccel.pipelines.hosts.causal_lm.quantization import describe_sharing
from mmaccel.pipelines.hosts.causal_lm.route import (
    ForwardRoute,
    choose_forward,
    describe_route,
    run_body,
    run_model,
    without_cudnn,
)
from mmaccel.pipelines.hosts.causal_lm.self_check import find_reason
from mmaccel.pipelines.hosts.causal_lm.states import KeptStates
from mmaccel.pipelines.hosts.layers.attention import Choices, Watcher, WindowPass
from mmaccel.pipelines.hosts.layers.sparse import BlockChooser
from mmaccel.pipelines.hosts.layers.stores import LayerStores
from mmaccel.pipelines.hosts.runner.compiled_passes import UseCompile
from mmaccel.pipelines.hosts.runner.engine import UseFused
from mmaccel.pipelines.hosts.runner.static_buffers import StaticModelBuffers

_CPU_STRIDE = 64
_CAUSAL_FROM = 128  # entries of a prompt that is attended to without a mask; a short one's is cheap
_OF_RUN = ("forwards", "tables", "prompt_logits", "_prompts", "_steps")


class CausalLMWindow(StaticModelBuffers, KeptStates, CanvasDrafts, MixedPasses):
    """A transformers model with a language-modelling head, decoded in windows.

    Args:
        vocab_size: V, if only the first V ids count; the rest of the head is not computed.
        stride: the attended length is a multiple of so many positions. None attends to all reserved
            ones, so that shapes are static for a given (R, W). "auto" is 64 on a CPU, None
            elsewhere.
        attention: of windows. "model" runs the layers' own under a mask, "kernel"
            `window_attention` in the layers where it can, "auto" does so where that is a Triton
            kernel. Prompts keep the model's.
        fused, compile: as of `Engine`. The fused decoder packs the model's weights, and a window
            does not unpack them.

    Raises:
        UnsupportedModelError: no causal LM, or one whose layers do not all use ordinary attention.
    """

    offers = frozenset(GLOSSARY)
    options = (*StaticModelBuffers.options, "stride")
    reserved = (*StaticModelBuffers.reserved, "n_reserved", "tables")
    needs_head: ClassVar[bool] = True  # whether logits come from the model's own head
    prompt_step: ClassVar[int] = 64  # widths of prompts on an accelerator are multiples of this

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int | None = None,
        stride: int | Literal["auto"] | None = "auto",
        attention: Literal["auto", "model", "kernel"] = "auto",
        fused: UseFused = False,
        compile: UseCompile = False,
        facts: ModelFacts | None = None,
    ) -> None:
        self.facts = find_facts(model) if facts is None else facts
        check_options(vocab_size, self.facts.n_ids, stride, attention)
        self.model = model
        self.vocab_size = self.facts.n_ids if vocab_size is None else vocab_size
        self.max_positions = self.facts.max_positions
        self.stride: int | str | None = stride
        self.attention = attention
        self.setup.fused = fused
        self.setup.compile = compile
        self.codes: Tensor | None = None  # [V, D], of each id; None where no token is a code
        self.choices: Choices | None = None  # collects which version of the kernel a layer ran
        self.pass_options: dict[str, Any] = {}  # of every forward, as output_hidden_states=True
        self.own_prompt: OwnPrompt | None = None  # that the model's own prefill processes
        self._narrow_head = name_head(model, self.vocab_size, self.facts.n_ids)
        self._forget_run()

    def _forget_run(self) -> None:
        self.attention_reason = "nothing is reserved"
        self.forwards = ForwardRoute()
        self.n_reserved = 0  # positions of each row
        self.tables: Any = None  # of the fused decoder's angles at these; None: it computes them
        self.prompt_logits: Tensor | None = None  # [R, V], behind whole prompts, for the first pass
        self._prompts: LayerStores | None = None  # until prompts that rows share are processed
        self._steps: Any = None  # what passes behind an own prompt do in the model's layers

    def __getstate__(self) -> dict[str, Any]:
        """Copies have no cache, no runner and no decoder, which is of this very model."""
        return {
            name: value for name, value in super().__getstate__().items() if name not in _OF_RUN
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_run()

    # ------------------------------------------------------------------ what is known of the model

    @property
    def device(self) -> torch.device:
        return find_device(self.model)

    @property
    def n_inputs(self) -> int:
        return self.vocab_size if self.own_vocabulary else max(self.vocab_size, self.facts.n_ids)

    @property
    def is_text(self) -> bool:
        return getattr(self.model.config, "model_type", None) not in IMAGE_CODES

    def vectors(self, kind: str) -> Tensor | None:
        if kind == "codes":
            return self.codes
        return None if self.own_vocabulary else self.input_matrix()

    def lack(self, word: str, part: Any = None) -> str:
        """Cost: at a model's first time, a self-check of a few short passes."""
        return find_lack(self, word, part) or super().lack(word, part)

    def plain(self) -> CausalLMWindow:
        """A window over the same model for self-checks: text, the model's own attention."""
        return CausalLMWindow(self.model, attention="model")

    # ------------------------------------------------------------------ a run

    def reserve(self, rows: int, positions: int) -> None:
        """Empty stores for a run. What passes write beyond `positions`, as finished rows do, is
        lost, and the logits there mean nothing.

        Raises:
            OptionError: more positions than the model supports, or a model in training mode with
                dropout or gradient checkpointing.
        """
        positions += self.methods.repeated
        check_capacity(rows, positions, self.max_positions)
        check_mode(self.model)
        self._forget_run()
        self.choose_route()
        self.attention_reason = find_reason(self)
        self.n_reserved = positions
        if self.forwards.decoder is not None:
            self.tables = self.forwards.decoder.make_tables(max(positions, 1))
        self.caches = open_stores(self, rows, positions)
        prefixes = self.setup.prefixes
        if prefixes is not None:
            self._prompts = open_stores(self, len(prefixes.rows), positions)

    def choose_route(self) -> None:
        self.forwards = choose_forward(self)

    def weights_state(self) -> Hashable:
        self.choose_route()  # which may pack the weights
        return super().weights_state()

    def graph_options(self) -> Hashable:
        return super().graph_options(), self.forwards.name

    @property
    def route(self) -> Route:
        return describe_route(self)

    @property
    def layer_counts(self) -> LayerCounts:
        return replace(super().layer_counts, step_bytes=count_step_bytes(self))

    # ------------------------------------------------------------------ its prompt

    @property
    def takes_whole_prompts(self) -> bool:
        """Where entries go, or are chosen, behind a prompt, its last token sees all and votes."""
        attention = self.methods.attention
        is_chosen = attention is not None and not attention.chooses_prompts
        return is_chosen or self.methods.evictor is not None

    @torch.no_grad()
    def process_prompt(self) -> PromptCost | None:
        prompt = self.own_prompt
        if prompt is None:
            return None
        stores = self.run_caches()
        states = prompt.process(stores.sparse, self.setup.prefill_chunk_size)
        take_prompt(stores, prompt, states)
        self._steps = states.steps
        self.prompt_logits = states.logits
        return PromptCost(states.n_processed, states.n_passes)

    def prompt_width(self, width: int) -> int:
        """On an accelerator a multiple of 64: libraries plan a few shapes, not one a prompt."""
        if self.device.type == "cpu" or self.own_prompt is not None or describe_sharing(self.model):
            return width
        return -(-width // self.prompt_step) * self.prompt_step

    def prefill(self, entries: Pass) -> None:
        """One pass without logits, or with those of one position; where rows share prompts, of one
        row a group. Surplus tokens of `prompt_width` are overwritten before a query sees them.

        Cost: one row's mask for all if `start` is one number expanded.
        """
        groups = self.setup.prefixes
        if groups is None or self._prompts is None:
            run_prompt(self, entries)
        elif prefill_shared(self, entries, groups, self._prompts):
            self._prompts = None

    # ------------------------------------------------------------------ its windows

    def forward(self, entries: Pass) -> Tensor:
        """Logits `[R, W, V]` of a window: one pass, no host synchronisation on an accelerator.

        Memory: under the model's own attention a mask `[R, 1, W, S]`, two if only some layers
        slide; sliding layers cache all positions.
        """
        if self.prompt_logits is None:
            return self._score(entries)
        # the window begins with the prompt's last token, whose entry and logits are there already
        first = self.prompt_logits[:, None]  # [R, 1, V]
        self.prompt_logits = None
        tokens = entries.tokens
        if tokens.shape[1] == 1:
            if self.keeps_states:  # what the head has read is unknown
                n_channels = self.output_matrix().shape[1] * max(1, len(self.kept_layers))
                self.last_states = first.new_zeros(*tokens.shape, n_channels)
            return first
        assert entries.start is not None
        parents = None if entries.parents is None else entries.parents[:, 1:] - 1
        rest = Pass(tokens[:, 1:], entries.start + 1, parents=parents)
        logits = torch.cat([first, self._score(rest, skipped=1)], 1)
        if self.last_states is not None:
            self.last_states = pad(self.last_states, (0, 0, 1, 0))  # zeros for the first entry
        return logits

    def _score(self, entries: Pass, skipped: int = 0) -> Tensor:
        chooser = self.run_caches().find_chooser()
        output = self.run_pass(entries, sparse=chooser, **self.pass_options)
        for option in self.pass_options:
            assert self.setup.recorder is not None
            name = option.removeprefix("output_")
            self.setup.recorder.record(name, getattr(output, name), skipped)
        logits: Tensor = output.logits
        if logits.shape[-1] >= self.facts.n_ids:  # the whole head was computed
            logits = logits[..., : self.vocab_size]
        if entries.queries is None:
            return logits
        return logits.gather(1, entries.queries[..., None].expand(-1, -1, logits.shape[-1]))

    def forward_draft(self, entries: Pass, index: int) -> Tensor:
        if self.prompt_logits is not None and index == 0:  # these stay for the pass that verifies
            return self.prompt_logits[:, None]
        chooser = self.run_caches().find_chooser(index)
        logits: Tensor = self.run_pass(entries, sparse=chooser).logits
        return logits[..., : self.vocab_size]

    def forward_canvas(self, entries: Pass) -> Tensor:
        return run_canvas(self, entries)

    def forward_mixed(self, entries: Pass, pieces: Sequence[PromptPiece]) -> Tensor:
        return run_mixed(self, entries, pieces)

    # ------------------------------------------------------------------ one pass

    @torch.no_grad()
    def run_pass(
        self, entries: Pass, *, is_prompt: bool = False, sparse: BlockChooser | None = None,
        watcher: Watcher | None = None, prompt: Tensor | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """The output of the forward; a prompt's runs the model's own attention where it can."""
        stores = self.run_caches()
        tokens = entries.tokens
        indices = entries.indices
        if tokens.shape[0] != stores.layout.rows:
            raise ShapeError(
                f"tokens: expected {stores.layout.rows} rows as reserved, received "
                f"{list(tokens.shape)}; call reserve(rows, positions)"
            )
        stores.prepare(indices, entries.reads, self.find_stride(indices.device))
        # layers attend by a function of ours where a mask is slower, or cannot say what is read
        decoder = self.forwards.decoder
        by_kernel = not self.attention_reason and (is_exact(self) or not is_prompt)
        is_reduced = stores.is_reduced and not is_prompt
        opens = entries.opens and tokens.shape[1] >= _CAUSAL_FROM
        opens = opens and decoder is not None and decoder.takes_causal
        beyond_masks = (entries.reads, entries.parents, watcher, sparse, stores.prefix)
        is_ours = by_kernel or is_reduced or opens or any(x is not None for x in beyond_masks)
        this: WindowPass | None = None
        masks = None
        if is_ours and self._steps is None:
            this = open_pass(
                self, entries, indices, sparse=sparse, watcher=watcher, prompt=prompt, opens=opens
            )
        else:
            masks = make_pass_masks(self, entries, indices)
        if self.own_prompt is not None:
            for name, value in self.own_prompt.inputs.items():  # [R, 1]
                options[name] = value.expand(-1, tokens.shape[1])
        # entries stand at cache indices; their positions differ where entries were evicted
        positions = stores.to_positions(find_positions(entries, indices, this))
        steps = nullcontext()
        if self._steps is not None:
            steps = self._steps.passing(indices, stores.layout)
        with steps:
            return self.run_forward(
                tokens, self.position_ids(positions), masks, this, is_prompt=is_prompt, **options
            )

    def find_stride(self, device: torch.device) -> int | None:
        """The attended length is rounded up to a multiple of it; None: all positions."""
        runner = self.setup.runner
        if runner is not None and runner.is_static:
            return None
        if isinstance(self.stride, str):
            return _CPU_STRIDE if device.type == "cpu" else None
        return self.stride

    def position_ids(self, positions: Tensor) -> Tensor:
        """The model's position ids of cache positions `[R, W]` int64."""
        positions = positions.clamp(max=self.n_reserved - 1)  # of surplus and of finished rows
        prompt = self.own_prompt
        if prompt is None or prompt.is_plain:
            return positions
        return positions + (prompt.next_position - prompt.lengths)[:, None]  # a shift for each row

    def run_forward(
        self, tokens: Tensor, position_ids: Tensor, masks: Any, this: WindowPass | None, *,
        is_prompt: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        """The output of the forward for tokens or embeddings at position ids `[R, W]`."""
        from transformers.cache_utils import Cache

        if masks is None:  # one zero: given no mask, some models synchronise to look for padding
            masks = tokens.new_zeros(len(tokens), 1, 1, 1, dtype=self.model.dtype)
        layers: Any = self.run_caches().layers
        entries = "input_ids" if tokens.ndim == 2 else "inputs_embeds"
        hands_out = self.forwards.decoder is not None and self.needs_head  # `run_body` keeps states
        with ExitStack() as stack:
            if self.keeps_states and not hands_out:
                stack.enter_context(self.keeping_states(is_prompt))
            stack.enter_context(without_cudnn(tokens.device))
            if this is not None:
                stack.enter_context(self.forwards.attending(self.model, this))
            return self.compute(
                attention_mask=masks,
                position_ids=position_ids,
                **{entries: tokens, self.facts.cache_argument: Cache(layers=layers)},
                use_cache=True,
                return_dict=True,
                **options,
            )

    def compute(self, **inputs: Any) -> Any:
        decoder = self.forwards.decoder
        if decoder is None:
            return run_model(self, inputs)
        kept = inputs.pop("logits_to_keep", 0)
        hidden = run_body(self, None, inputs)
        if isinstance(kept, int) and kept:  # of a prompt whose logits nobody reads
            return SimpleNamespace(logits=None)
        return SimpleNamespace(logits=decoder.logits(select_kept(hidden, kept), self.vocab_size))

    def replaced_tensors(self) -> dict[str, Tensor]:
        """What stands for parameters in a pass, by name: the head `[V, D]` alone if it is cut."""
        return take_rows(self.model, self._narrow_head, slice(self.vocab_size))


def select_kept(hidden: Tensor, kept: int | Tensor) -> Tensor:
    """Of `[R, W, C]` what `logits_to_keep` names: the last n, all for 0, or these columns."""
    return hidden[:, kept] if isinstance(kept, Tensor) else hidden[:, -kept:]
