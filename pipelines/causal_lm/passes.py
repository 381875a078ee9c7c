"""WindowPasses: the passes of a causal LM over its caches, and over its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import Pass
from mmaccel.errors import ShapeError
from mmaccel.model_parts import PromptPiece
from mmaccel.pipelines.causal_lm.caches import LayerCaches
from mmaccel.pipelines.layers.attention import Watcher, WindowPass, find_ancestors
from mmaccel.pipelines.layers.mixed_pass import MixedPass
from mmaccel.pipelines.layers.observing import Observer, RepeatedPrompt
from mmaccel.pipelines.layers.sparse import BlockChooser
from mmaccel.pipelines.layers.store import make_masks

if TYPE_CHECKING:
    from mmaccel.pipelines.causal_lm.model import CausalLMWindow

_CPU_STRIDE = 64
_CAUSAL_FROM = 128  # entries of a prompt that is attended to without a mask; a short one's is cheap


class WindowPasses:
    """The passes of one window.

    The window holds no object of this class: one that nobody holds any more is freed at once, with
    its runner's graphs.

    Args:
        window: the window.
    """

    __slots__ = ("_window",)

    def __init__(self, window: CausalLMWindow) -> None:
        self._window = window

    def caches(self) -> LayerCaches:
        """The caches of the run; raises ShapeError before `reserve`."""
        found = self._window.caches
        if found is None:
            raise ShapeError(
                "tokens: expected a call of reserve first, received a pass; call "
                "reserve(rows, positions)"
            )
        return found

    def process_prompt(self) -> int | None:
        """See `CausalLMWindow.process_prompt`."""
        own = self._window.own_prompt
        if own is None:
            return None
        caches = self.caches()
        states = own.process(caches.sparse)
        caches.take(own, states)
        self._window.prompt_logits = states.logits
        return states.n_processed

    def prefill(self, entries: Pass) -> None:
        """See `CausalLMWindow.prefill`."""
        window = self._window
        caches = self.caches()
        width = entries.tokens.shape[1]
        lengths = entries.lengths
        if lengths is None:
            lengths = torch.full_like(entries.indices[:, 0], width)
        observer = caches.observe_part(lengths, width)
        surplus = window.prompt_width(width) - width
        if surplus and entries.reads is None:
            sides = (0, 0) * (entries.tokens.ndim - 2)
            entries = replace(entries, tokens=pad(entries.tokens, (*sides, 0, surplus)))
        attention = window.methods.attention
        chooses = False
        if attention is not None and entries.lengths is not None and entries.reads is None:
            chooses = attention.chooses_prompts and not attention.is_whole
        ends = lengths - 1
        is_here = (ends >= 0) & (ends < width)
        options = dict(window.facts.last_only)
        wanted = ends[is_here].unique() if window.takes_whole_prompts else ends[:0]
        if len(wanted) and options:
            options = dict.fromkeys(options, wanted.cpu())  # the head may be on another device
            ends = torch.searchsorted(wanted, ends)
        output = self._run(
            entries,
            is_prompt=True,
            sparse=caches.sparse if chooses else None,
            watcher=observer,
            prompt=lengths if chooses else None,
            **options,
        )
        if len(wanted):
            self._keep_logits(output.logits, ends, is_here)
        if window.read_prompt is not None and window.setup.prefixes is None:
            assert window.last_states is not None
            window.read_prompt(entries, window.last_states)
        if observer is not None:
            self._repeat(entries.tokens[:, :width], lengths, observer)
        caches.end_part()

    def _keep_logits(self, logits: Tensor, ends: Tensor, is_here: Tensor) -> None:
        """Keep the logits behind prompts for the first pass.

        Args:
            logits: `[R, n, V]`, of the pass.
            ends: `[R]` int64, which of the n are behind a row's prompt.
            is_here: `[R]` bool, whether a row's prompt ends in the pass.
        """
        window = self._window
        at = ends.clamp(0, logits.shape[1] - 1).to(logits.device)[:, None, None]
        found = logits.gather(1, at.expand(-1, -1, logits.shape[2]))[:, 0, : window.vocab_size]
        before = window.prompt_logits
        is_new = is_here.to(found.device)[:, None]
        window.prompt_logits = found if before is None else torch.where(is_new, found, before)

    def _repeat(self, tokens: Tensor, lengths: Tensor, observer: Observer) -> None:
        """Feed a prompt `[R, T]` a second time behind itself, for a method that asks for it.

        What is written behind the prompt is overwritten by what comes.
        """
        method = self._window.methods.evictor
        if method is None or not method.repeated or int(lengths.max()) <= method.budget:
            return
        watcher = RepeatedPrompt(observer, lengths)
        for first in range(0, tokens.shape[1], method.repeated):
            watcher.begin(first)
            piece = Pass(tokens[:, first : first + method.repeated], lengths)
            self._run(piece, watcher=watcher, **self._window.facts.last_only)

    def forward(self, entries: Pass) -> Tensor:
        """See `CausalLMWindow.forward`."""
        window = self._window
        tokens = entries.tokens
        if window.prompt_logits is None:
            return self._score(entries)
        known = window.prompt_logits[:, None]
        window.prompt_logits = None
        if tokens.shape[1] == 1:
            if window.keeps_states:  # unknown
                n_channels = window.output_matrix().shape[1] * max(1, len(window.kept_layers))
                window.last_states = known.new_zeros(*tokens.shape, n_channels)
            return known
        # the prompt's last token is in the cache
        assert entries.start is not None
        parents = None if entries.parents is None else entries.parents[:, 1:] - 1
        rest = Pass(tokens[:, 1:], entries.start + 1, parents=parents)
        logits = torch.cat([known, self._score(rest, skipped=1)], 1)
        if window.last_states is not None:  # unknown for the first entry
            window.last_states = pad(window.last_states, (0, 0, 1, 0))
        return logits

    def forward_draft(self, entries: Pass, index: int) -> Tensor:
        """See `CausalLMWindow.forward_draft`."""
        known = self._window.prompt_logits
        if known is not None and index == 0:  # the prompt's last token is in the cache, and stays
            return known[:, None]
        logits: Tensor = self._run(entries, sparse=self.caches().find_chooser(index)).logits
        return logits[..., : self._window.vocab_size]

    def forward_canvas(self, entries: Pass) -> Tensor:
        """See `CausalLMWindow.forward_canvas`. Cost: a host synchronisation."""
        known = self._window.prompt_logits
        if known is not None:  # the prompt's last token is in the cache, and stays
            assert entries.start is not None
            entries = Pass(entries.tokens[:, 1:], entries.start + 1)
        end = entries.indices[:, -1:, None] + 1  # [R, 1, 1]
        n_read = min(int(end.max()), self.caches().layout.max_length)
        reads = torch.arange(n_read, device=end.device) < end
        logits: Tensor = self._run(replace(entries, reads=reads)).logits
        logits = logits[..., : self._window.vocab_size]
        return logits if known is None else torch.cat([known[:, None], logits], 1)

    def _score(self, entries: Pass, skipped: int = 0) -> Tensor:
        """Logits `[R, W, V]`; the recorder gets what else the model gives out.

        Args:
            skipped: entries of the window before these.
        """
        window = self._window
        chooser = self.caches().find_chooser()
        output = self._run(entries, sparse=chooser, **window.pass_options)
        recorder = window.setup.recorder
        for option in window.pass_options:
            assert recorder is not None
            name = option.removeprefix("output_")
            recorder.record(name, getattr(output, name), skipped)
        logits: Tensor = output.logits
        is_whole = logits.shape[-1] >= window.facts.n_ids
        logits = logits[..., : window.vocab_size] if is_whole else logits
        if entries.queries is None:
            return logits
        return logits.gather(1, entries.queries[..., None].expand(-1, -1, logits.shape[-1]))

    def _open(
        self,
        entries: Pass,
        indices: Tensor,
        *,
        sparse: BlockChooser | None,
        watcher: Watcher | None = None,
        prompt: Tensor | None = None,
        opens: bool = False,
    ) -> WindowPass:
        """The pass, with `indices` `[R, W]`, as its layers know it."""
        window = self._window
        caches = self.caches()
        prefix = caches.prefix
        if prefix is not None and caches.layout.selected_rows is not None:
            prefix = prefix.select(caches.layout.selected_rows)
        return WindowPass(
            indices[:, 0].contiguous() if entries.start is None else entries.start,
            caches.windows,
            caches.layers,
            by_kernel=not window.attention_reason,
            ragged=window.setup.ragged,
            num_splits=1 if window.setup.fused == "exact" else None,
            choices=window.choices,
            sparse=sparse,
            watcher=caches.rounds if watcher is None else watcher,
            prompt=prompt,
            tree=None if entries.parents is None else find_ancestors(entries.parents),
            reads=entries.reads,
            opens=opens,
            prefix=prefix,
        )

    @torch.no_grad()
    def _run(
        self,
        entries: Pass,
        *,
        is_prompt: bool = False,
        sparse: BlockChooser | None = None,
        watcher: Watcher | None = None,
        prompt: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """The output of the model's forward.

        Args:
            is_prompt: whether the model's own attention serves, as long as it can.
            sparse: chooses the blocks that layers attend to; None: all.
            watcher: looks at the layers; None: nothing does.
            prompt: see `WindowPass`.
            **options: further arguments of the forward.

        Raises:
            ShapeError: another number of rows than reserved.
        """
        window = self._window
        caches = self.caches()
        tokens = entries.tokens
        indices = entries.indices
        if tokens.shape[0] != caches.layout.rows:
            raise ShapeError(
                f"tokens: expected {caches.layout.rows} rows as reserved, received "
                f"{list(tokens.shape)}; call reserve(rows, positions)"
            )
        caches.prepare(indices, entries.reads, self._find_stride(indices.device))
        steps = caches.steps
        this: WindowPass | None = None  # where the layers attend by themselves, under masks
        is_own = not is_prompt and (not window.attention_reason or caches.is_reduced)
        decoder = window.forwards.decoder
        opens = entries.opens and decoder is not None and decoder.takes_causal
        opens = opens and tokens.shape[1] >= _CAUSAL_FROM
        asked = (entries.reads, entries.parents, watcher, sparse, caches.prefix)
        if steps is None and (is_own or opens or any(each is not None for each in asked)):
            this = self._open(
                entries, indices, sparse=sparse, watcher=watcher, prompt=prompt, opens=opens
            )
        if window.own_prompt is not None:
            given = window.own_prompt.inputs
            options |= {name: value.expand(-1, tokens.shape[1]) for name, value in given.items()}
        positions = caches.to_positions(_find_positions(entries, indices, this))
        with nullcontext() if steps is None else steps.passing(indices, caches.layout):
            return self._compute(
                tokens,
                window.position_ids(positions),
                self._make_masks(entries, indices) if this is None else None,
                this,
                is_prompt=is_prompt,
                **options,
            )

    def _compute(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        masks: Any,
        this: WindowPass | None,
        *,
        is_prompt: bool = False,
        **options: Any,
    ) -> Any:
        """The output of the model's forward, under masks or as a pass says."""
        window = self._window
        if masks is None:  # one zero: given no mask, some models synchronise to look for padding
            masks = tokens.new_zeros(len(tokens), 1, 1, 1, dtype=window.model.dtype)
        with (
            self._keeping_states(is_prompt),
            without_cudnn(tokens.device),
            nullcontext() if this is None else window.forwards.attending(this),
        ):
            return window.compute(
                **{"input_ids" if tokens.ndim == 2 else "inputs_embeds": tokens},
                attention_mask=masks,
                position_ids=position_ids,
                **{window.facts.cache_argument: self.caches().cache},
                use_cache=True,
                return_dict=True,
                **options,
            )

    @torch.no_grad()
    def forward_mixed(self, entries: Pass, pieces: Sequence[PromptPiece]) -> Tensor:
        """See `CausalLMWindow.forward_mixed`: a pass over one row of all entries."""
        window = self._window
        caches = self.caches()
        rows, width = entries.tokens.shape
        indices = entries.indices
        caches.prepare(indices, None, self._find_stride(indices.device))
        whole = self._open(entries, indices, sparse=caches.find_chooser())
        wanted = entries.wanted
        tokens = [entries.tokens.flatten()]
        positions = [_find_positions(entries, indices, whole).flatten()]
        place: Tensor | None = None  # [R W], of each entry or the first of its row
        if wanted is not None:
            for layout in caches.layouts:
                layout.choose_entries(wanted)
            tokens, positions = [tokens[0][wanted]], [positions[0][wanted]]
            order = torch.arange(len(wanted), device=wanted.device)
            found = torch.full_like(indices, -1).view(-1).scatter(0, wanted, order)
            found = found.view(rows, width)
            place = found.where(found >= 0, found[:, :1]).flatten()
        parts: list[tuple[PromptPiece, WindowPass]] = []
        for piece in pieces:
            end = piece.start + len(piece.tokens)
            index = torch.arange(piece.start, end, device=indices.device)
            stores = caches.add_row(piece.row, piece.start, end)
            prefix = caches.prefix
            if prefix is not None:
                prefix = prefix.select(index.new_tensor([piece.row]))
            by_kernel = whole.by_kernel
            own = WindowPass(index[:1], whole.windows, stores, by_kernel=by_kernel, prefix=prefix)
            tokens.append(piece.tokens)
            positions.append(index)
            parts.append((piece, own))
        this = MixedPass(
            whole.start, whole.windows, whole.stores, whole=whole, pieces=parts, wanted=wanted,
            place=place,
        )  # fmt: skip
        n_windows = len(tokens[0])
        kept: dict[str, Any] = {}
        if pieces:
            kept = dict.fromkeys(window.facts.last_only, torch.arange(n_windows))
        output = self._compute(
            torch.cat(tokens)[None],
            window.position_ids(torch.cat(positions)[:, None]).mT,
            None,
            this,
            **kept,
        )
        states = window.last_states
        logits: Tensor = output.logits[:, :n_windows, : window.vocab_size]
        if place is not None:
            logits = logits[:, place]
            states = None if states is None else states[:, place]
        if states is not None:
            window.last_states = states[:, : rows * width].view(rows, width, -1)
        return logits.view(rows, width, -1)

    def _make_masks(self, entries: Pass, indices: Tensor) -> Any:
        """The masks of a pass, as the model's forward takes them."""
        window = self._window
        start = entries.start
        is_expanded = start is not None and start.stride(0) == 0  # one number for all rows
        queries = indices[:1] if is_expanded else indices
        visible = self.caches().layout.visible_length
        rows = len(entries.tokens)
        return make_masks(queries, rows, visible, window.facts.windows, window.model.dtype)

    def _find_stride(self, device: torch.device) -> int | None:
        """The attended length is rounded up to a multiple of it; None: all positions."""
        runner = self._window.setup.runner
        if runner is not None and runner.is_static:
            return None
        stride = self._window.stride
        if isinstance(stride, str):
            return _CPU_STRIDE if device.type == "cpu" else None
        return stride

    def states(self, body: Callable[..., Any] | None, inputs: dict[str, Any]) -> Tensor:
        """Hidden states `[R, W, C]` of a forward; see `ForwardRoute.states`."""
        window = self._window
        forwards = window.forwards
        own = window.own_prompt
        kept = (
            dict.fromkeys(window.kept_layers, torch.empty(0, dtype=torch.float32))
            if window.keeps_states
            else {}
        )
        hidden = forwards.states(
            body, inputs, self.caches(), counts_tokens=own is None or own.is_plain, kept=kept
        )
        if window.keeps_states and forwards.decoder is not None:
            states = [kept[layer] for layer in window.kept_layers] if kept else [hidden]
            window.last_states = torch.cat(states, -1)
        return hidden

    @contextmanager
    def _keeping_states(self, is_prompt: bool) -> Iterator[None]:
        """Store the states that are wanted in `last_states`.

        The fused decoder hands them out itself, see `states`.

        Args:
            is_prompt: whether the head reads fewer states than there are entries.
        """
        window = self._window
        is_fused = window.forwards.decoder is not None and window.needs_head
        if not window.keeps_states or is_fused:
            yield
            return
        kept: dict[int, Tensor] = {}

        def keep_input(layer: int) -> Callable[..., None]:
            def keep(module: Any, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
                kept[layer] = given[0] if given else named["hidden_states"]

            return keep

        def keep_output(decoder: Any, given: Any, output: Any) -> None:
            window.last_states = output.last_hidden_state

        decoder = window.model.get_decoder()
        hooks = [
            decoder.layers[layer].register_forward_pre_hook(keep_input(layer), with_kwargs=True)
            for layer in window.kept_layers
        ]
        if not hooks and is_prompt and window.read_prompt is not None:
            hooks.append(decoder.register_forward_hook(keep_output))
        elif not hooks:
            head = window.output_head()
            hooks.append(head.register_forward_pre_hook(keep_input(0), with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if kept:
            device = kept[min(kept)].device
            states = [kept[layer].to(device) for layer in window.kept_layers or (0,)]
            window.last_states = torch.cat(states, -1)


def select_kept(hidden: Tensor, kept: int | Tensor) -> Tensor:
    """Of states `[R, W, C]` those that transformers' `logits_to_keep` names: the last n, all for 0,
    or those of these columns.
    """
    return hidden[:, kept] if isinstance(kept, Tensor) else hidden[:, -kept:]


def _find_positions(entries: Pass, indices: Tensor, this: WindowPass | None) -> Tensor:
    """`[R, W]` int64, positions of the entries of a pass with `indices` `[R, W]`."""
    if entries.positions is not None:
        return entries.positions
    if this is not None and this.tree is not None:  # entries of one depth share a position
        return this.start[:, None] + this.tree.sum(-1) - 1
    return indices


@contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
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
