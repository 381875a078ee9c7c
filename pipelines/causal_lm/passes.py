"""WindowPasses: the passes of a causal LM over its caches, and over its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import Pass
from mmaccel.errors import ShapeError
from mmaccel.pipelines.causal_lm.caches import LayerCaches
from mmaccel.pipelines.causal_lm.compatibility import ModelFacts
from mmaccel.pipelines.causal_lm.forwards import ForwardRoute
from mmaccel.pipelines.causal_lm.own_prompt import OwnPrompt
from mmaccel.pipelines.layers.attention import Choices, Watcher, WindowPass, find_ancestors
from mmaccel.pipelines.layers.eviction import Observer
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.pipelines.layers.store import make_masks

_CPU_STRIDE = 64


class PassedWindow(Protocol):
    """A window over a causal LM, as its passes see it; `CausalLMWindow` describes it."""

    model: Any
    vocab_size: int
    facts: ModelFacts
    forwards: ForwardRoute
    caches: LayerCaches | None
    attention_reason: str | None
    route: str
    choices: Choices | None
    pass_options: dict[str, Any]
    own_prompt: OwnPrompt | None
    prompt_logits: Tensor | None
    stride: int | str | None
    methods: LayerMethods
    keeps_states: bool
    last_states: Tensor | None
    needs_head: ClassVar[bool]
    runner: Any
    recorder: Any

    def position_ids(self, positions: Tensor) -> Tensor:
        """What the model's forward takes for `positions` `[R, W]`."""

    def prompt_width(self, width: int) -> int:
        """The width at which a prompt is processed."""

    def compute(self, **inputs: Any) -> Any:
        """The output of a forward with these arguments of the model's."""

    def output_head(self) -> Any:
        """The linear layer that computes the logits."""

    def output_matrix(self) -> Tensor:
        """`[V, C]`, of that layer."""


class WindowPasses:
    """The passes of one window.

    The window holds no object of this class: one that nobody holds any more is freed at once, with
    its runner's graphs.

    Args:
        window: the window.
    """

    __slots__ = ("_window",)

    def __init__(self, window: PassedWindow) -> None:
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
        states = own.process()
        caches.take(own, states)
        self._window.prompt_logits = states.logits
        return states.n_processed

    def prefill(self, entries: Pass) -> None:
        """See `CausalLMWindow.prefill`."""
        window = self._window
        tokens = entries.tokens
        start = entries.start
        assert start is not None
        width = tokens.shape[1]
        surplus = window.prompt_width(width) - width
        tokens = pad(tokens, (0, surplus)) if surplus else tokens
        method = window.methods.kv_cache
        if method is None:
            self._run(tokens, start, None, **window.facts.last_only)
            return
        lengths = entries.lengths
        if lengths is None:
            lengths = torch.full_like(start, width)
        observer = Observer.of_last(lengths, method.observed)
        self._run(tokens, start, self._open(start, watcher=observer), **window.facts.last_only)
        self.caches().evict(lengths, observer)

    def forward(self, entries: Pass) -> Tensor:
        """See `CausalLMWindow.forward`."""
        window = self._window
        tokens = entries.tokens
        start = entries.start
        assert start is not None
        if window.prompt_logits is None:
            return self._score(entries)
        known = window.prompt_logits[:, None]
        window.prompt_logits = None
        if tokens.shape[1] == 1:
            if window.keeps_states:  # unknown
                n_channels = window.output_matrix().shape[1]
                window.last_states = known.new_zeros(*tokens.shape, n_channels)
            return known
        # the prompt's last token is in the cache
        parents = None if entries.parents is None else entries.parents[:, 1:] - 1
        rest = Pass(tokens[:, 1:], start + 1, parents=parents)
        logits = torch.cat([known, self._score(rest, skipped=1)], 1)
        if window.last_states is not None:  # unknown for the first entry
            window.last_states = pad(window.last_states, (0, 0, 1, 0))
        return logits

    def _score(self, entries: Pass, skipped: int = 0) -> Tensor:
        """Logits `[R, W, V]`; the recorder gets what else the model gives out.

        Args:
            entries: of the pass.
            skipped: entries of the window before these.
        """
        window = self._window
        start = entries.start
        assert start is not None
        tree = None if entries.parents is None else find_ancestors(entries.parents)
        output = self._run(entries.tokens, start, self._open(start, tree), **window.pass_options)
        for option in window.pass_options:
            name = option.removeprefix("output_")
            window.recorder.record(name, getattr(output, name), skipped)
        logits: Tensor = output.logits
        is_whole = logits.shape[-1] >= window.facts.n_ids
        return logits[..., : window.vocab_size] if is_whole else logits

    def _open(
        self, start: Tensor, tree: Tensor | None = None, watcher: Watcher | None = None
    ) -> WindowPass | None:
        window = self._window
        return self.caches().open_pass(
            start, by_kernel=not window.attention_reason, choices=window.choices, watcher=watcher,
            tree=tree,
        )  # fmt: skip

    @torch.no_grad()
    def _run(self, tokens: Tensor, start: Tensor, this: WindowPass | None, **options: Any) -> Any:
        """The output of the model's forward.

        Args:
            tokens: `[R, W]`.
            start: `[R]` int64.
            this: the pass as its layers know it; None: they attend under masks.
            **options: further arguments of the forward.
        """
        window = self._window
        caches = self.caches()
        positions = caches.prepare(tokens, start, self._find_stride(start.device))
        dtype = window.model.dtype
        if this is None:
            queries = positions[:1] if start.stride(0) == 0 else positions  # one start, expanded
            visible = caches.layout.visible_length
            windows = window.facts.windows
            masks: Any = make_masks(queries, len(tokens), visible, windows, dtype)
        else:  # a mask of one zero: given none, some models synchronise to check for padding
            masks = start.new_zeros(len(tokens), 1, 1, 1, dtype=dtype)
        if this is not None and this.tree is not None:  # entries of one depth share a position
            positions = start[:, None] + this.tree.sum(-1) - 1
        own: dict[str, Tensor] = {}
        if window.own_prompt is not None:
            own = {k: v.expand(-1, tokens.shape[1]) for k, v in window.own_prompt.inputs.items()}
        steps = caches.steps
        with (
            self._keeping_states(),
            without_cudnn(tokens.device),
            nullcontext() if this is None else window.forwards.attending(this),
            nullcontext() if steps is None else steps.passing(positions, caches.layout),
        ):
            return window.compute(
                input_ids=tokens,
                attention_mask=masks,
                position_ids=window.position_ids(positions),
                **{window.facts.cache_argument: caches.cache},
                use_cache=True,
                return_dict=True,
                **own,
                **options,
            )

    def _find_stride(self, device: torch.device) -> int | None:
        """The attended length is rounded up to a multiple of it; None: all positions."""
        runner = self._window.runner
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
        hidden = forwards.states(
            body, inputs, self.caches(), counts_tokens=own is None or own.is_plain
        )
        window.route = forwards.name
        if window.keeps_states and forwards.decoder is not None:
            window.last_states = hidden
        return hidden

    @contextmanager
    def _keeping_states(self) -> Iterator[None]:
        """Store what the output head reads in `last_states`, if they are wanted.

        The fused decoder computes the head's layer itself, see `states`.
        """
        window = self._window
        is_fused = window.forwards.decoder is not None and window.needs_head
        if not window.keeps_states or is_fused:
            yield
            return

        def keep(head: Any, given: tuple[Tensor, ...]) -> None:
            window.last_states = given[0]

        hook = window.output_head().register_forward_pre_hook(keep)
        try:
            yield
        finally:
            hook.remove()


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
