"""ModelCalls: all that a window run asks of its token model."""

from __future__ import annotations

import time

import torch
from torch import OutOfMemoryError, Tensor

from mmaccel.contracts import Pass, TokenModel
from mmaccel.errors import OptionError
from mmaccel.results import Stats
from mmaccel.samplers.window.recorder import StepRecorder
from mmaccel.samplers.window.step_runner import Once, StepRunner


class ModelCalls:
    """The calls of one run to its model.

    Args:
        model: the token model.
        runner: carries steps out.
        stats: of the run; passes over the prompt and seconds are counted here.
        spare: cache indices a row beside those of positions, for trees.

    Attributes:
        recorder: the model's `StepRecorder`; None without one.
        is_recorded: whether passes record anything.
        has_own_prompt: whether the model itself has processed the prompt.
    """

    def __init__(self, model: TokenModel, runner: StepRunner, stats: Stats, spare: int = 0) -> None:
        self.model = model
        self.recorder: StepRecorder | None = model.recorder
        self.is_recorded = self.recorder is not None and self.recorder.is_active
        self.has_own_prompt = False
        self._spare = spare
        self._runner = runner
        self._stats = stats

    def begin(
        self, tokens: Tensor, lengths: Tensor, positions: int, short_prompt: Tensor | None
    ) -> None:
        """Reserve the cache and run the prompt without its last token.

        Once more if memory lacked and the graphs of other runs had some.

        Args:
            tokens: `[R, N]`, of the prompt.
            lengths: `[R]` int64, of the prompts.
            positions: of the cache.
            short_prompt: `[R, N']`, the static tensor of a prompt that is prefilled in a step of
                its own; None for one that is not.
        """
        try:
            self._begin(tokens, lengths, positions, short_prompt)
            return
        except OutOfMemoryError:
            if not self._runner.free_memory():
                raise
        # here, as the handler still refers to the tensors of the failed pass
        self._begin(tokens, lengths, positions, short_prompt)

    def _begin(
        self, tokens: Tensor, lengths: Tensor, positions: int, short_prompt: Tensor | None
    ) -> None:
        if self._spare:
            self.model.make_room(self._spare)
        self._runner.reserve(self.model, tokens.shape[0], positions)
        began = time.perf_counter()
        n_processed = self.model.process_prompt()
        self.has_own_prompt = n_processed is not None
        if n_processed is None and tokens.shape[1] > 1:
            self._prefill(tokens[:, :-1], lengths, short_prompt)
            n_processed = tokens[:, :-1].numel()
        if n_processed is not None:
            self._stats.forward_seconds += time.perf_counter() - began
            self._stats.prefill_passes += 1
            self._stats.tokens_processed += n_processed

    def _prefill(self, tokens: Tensor, lengths: Tensor, short_prompt: Tensor | None) -> None:
        """Prefill with `[R, N]`, of a short prompt in a step of its own."""
        if short_prompt is None:
            start = lengths.new_zeros(1).expand_as(lengths)
            self.model.prefill(Pass(tokens.clamp(min=0), start, lengths=lengths - 1))
            return
        width = self.model.prompt_width(tokens.shape[1])

        def step() -> None:
            start = lengths.new_zeros(1).expand_as(lengths)
            tokens = short_prompt[:, :width].clamp(min=0)
            self.model.prefill(Pass(tokens, start, lengths=lengths - 1))

        self._runner.run_step(Once("prompt", width), step)

    def forward(self, entries: Pass) -> Tensor:
        """Raw logits `[R, W, V]` of a pass."""
        began = time.perf_counter()
        logits = self.model.forward(entries).detach()
        self._stats.forward_seconds += time.perf_counter() - began
        return logits

    def count_entries(self, n: int) -> None:
        """Count entries that a pass has beside its window."""
        self._stats.tokens_processed += n

    def commit(self, start: Tensor, entries: Tensor, n_new: Tensor) -> None:
        """Tell the model which entries of a tree were accepted.

        Args:
            start: `[R]` int64, cache index of the pass's first entry.
            entries: `[B, W]` int64, the path.
            n_new: `[B]` int64, tokens that were accepted: the entries up to the last of them.
        """
        index = torch.arange(entries.shape[1], device=entries.device)
        path = torch.where(index < n_new[:, None], entries, -1)
        self.model.commit(start, path.repeat(len(start) // len(path), 1))

    def record(self, name: str, value: Tensor) -> None:
        """Show the recorder a value `[B, W, V]` of the current pass."""
        assert self.recorder is not None
        self.recorder.record(name, value)

    def record_accepted(self, first: Tensor, n_new: Tensor) -> None:
        """Tell the recorder that `n_new` `[B]` tokens from slot `first` `[B]` on were accepted."""
        assert self.recorder is not None
        self.recorder.accept(first, n_new)

    def describe(self) -> None:
        """Fill in the statistics what the model says of its passes."""
        stats, model = self._stats, self.model
        if self._spare:
            model.make_room(0)
        reason = model.attention_reason
        if reason is not None:
            stats.attention = f"the model's own: {reason}" if reason else "window_attention"
        stats.route = model.route
        stats.route_reason = model.route_reason
        shared = model.shared_rounding
        if shared:
            stats.exactness = "relaxed"
            stats.notes.append(shared)


def check_decodes(model: object, policy: object) -> None:
    """Raise OptionError for a model that fills a canvas."""
    if not isinstance(model, TokenModel):
        raise OptionError(
            f"policy: expected one that fills a canvas for a {type(model).__name__}, received "
            f"{policy!r}, which decodes token after token; choose one such as Stepwise()"
        )
