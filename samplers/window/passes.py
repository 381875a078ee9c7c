"""The passes of a window run: what is asked of the model, and the scores that come of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import OutOfMemoryError, Tensor

from mmaccel.contracts import Pass, TokenModel
from mmaccel.model_parts import CapturedBuffers, MixedPasses, PromptPiece, TreePasses
from mmaccel.results import Stats
from mmaccel.samplers.arithmetic import PassFormats, as_called
from mmaccel.samplers.drafting.contract import Drafter, PassPath, PassScores
from mmaccel.samplers.prompt_chunks import count_prompts, prefill_together
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.rows import RunRows
from mmaccel.samplers.window.step_runner import Once, StepRunner
from mmaccel.samplers.window.step_state import Held


class ModelCalls:
    """The calls of one run to its model.

    Args:
        model: the token model.
        runner: carries steps out.
        stats: of the run; passes over the prompt and seconds are counted here.
        spare: cache indices a row beside those of positions, for trees.

    Attributes:
        recording: receives what passes give out; None where nothing does.
        formats: what passes are computed in.
        has_own_prompt: whether the model itself has processed the prompt.
        knows_first: whether the logits behind the prompt were computed with it.
        n_behind: entries of all rows that the last pass had beside its window.
        pieces: of prompts, which the next pass processes, too.
    """

    def __init__(self, model: TokenModel, runner: StepRunner, stats: Stats, spare: int = 0) -> None:
        self.model = model
        recorder = model.setup.recorder
        self.recording = recorder if recorder is not None and recorder.is_active else None
        self.formats = PassFormats(model)
        self.has_own_prompt = False
        self.knows_first = False
        self.n_behind = 0
        self.pieces: Sequence[PromptPiece] = ()
        self._has_chunks = False  # whether prompts are processed in chunks
        self._spare = spare
        self._runner = runner
        self._stats = stats

    def begin(
        self, tokens: Tensor | None, lengths: Tensor, positions: int, short_prompt: Tensor | None
    ) -> None:
        """Reserve the cache and run the prompt, in most models without its last token.

        Once more if memory lacked and the graphs of other runs had some.

        Args:
            tokens: `[R, N]`, of the prompt; None where the scheduler lets it be processed.
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

    @as_called()
    def _begin(
        self,
        tokens: Tensor | None,
        lengths: Tensor,
        positions: int,
        short_prompt: Tensor | None,
    ) -> None:
        self.model.setup.spare = self._spare
        self._runner.reserve(self.model, len(lengths), positions)
        began = time.perf_counter()
        own = self.model.process_prompt()
        self.has_own_prompt = own is not None
        self.knows_first = self.has_own_prompt or self.model.takes_whole_prompts
        n_left = 0 if self.knows_first else 1  # tokens of the first window
        n_processed, n_passes = (None, 1) if own is None else own
        has_size = self.model.setup.prefill_chunk_size is not None
        self._has_chunks = n_processed is None and tokens is None and has_size
        if n_processed is None and tokens is not None and tokens.shape[1] > n_left:
            n_columns = tokens.shape[1] - n_left
            n_passes = self._prefill(tokens[:, :n_columns], lengths, n_left, short_prompt)
            n_processed = count_prompts(self.model, tokens) * n_columns
        if n_processed is not None:
            self._stats.forward_seconds += time.perf_counter() - began
            self._stats.prefill_passes += n_passes
            self._stats.tokens_processed += n_processed

    def _prefill(
        self, tokens: Tensor, lengths: Tensor, n_left: int, short_prompt: Tensor | None
    ) -> int:
        """Prefill with `[R, N]`, of a short prompt in a step of its own; returns the passes."""
        size = self.model.setup.prefill_chunk_size
        n_tokens = count_prompts(self.model, tokens) * tokens.shape[1]
        self._has_chunks = size is not None and n_tokens > size
        if short_prompt is None or self._has_chunks:
            return prefill_together(
                self.model, tokens, lengths - n_left, size if self._has_chunks else None
            )
        assert isinstance(self.model, CapturedBuffers)
        width = self.model.prompt_width(tokens.shape[1])

        def step() -> None:
            start = lengths.new_zeros(1).expand_as(lengths)
            tokens = short_prompt[:, :width].clamp(min=0)
            self.model.prefill(Pass(tokens, start, lengths=lengths - n_left, opens=True))

        self._runner.run_step(Once("prompt", width), step)
        return 1

    def forward(self, entries: Pass) -> Tensor:
        """Raw logits `[R, W, V]` of a pass."""
        began = time.perf_counter()
        pieces = self.pieces
        self.pieces = ()
        self.n_behind = sum(len(piece.tokens) for piece in pieces)
        with self.formats.passing():
            if pieces:
                assert isinstance(self.model, MixedPasses)
                logits = self.model.forward_mixed(entries, pieces).detach()
            else:
                logits = self.model.forward(entries).detach()
        self.formats.note(logits)
        self._stats.forward_seconds += time.perf_counter() - began
        return logits

    def commit(self, start: Tensor, entries: Tensor, n_new: Tensor) -> None:
        """Tell the model which entries of a tree were accepted.

        Args:
            start: `[R]` int64, cache index of the pass's first entry.
            entries: `[B, W]` int64, the path.
            n_new: `[B]` int64, tokens that were accepted: the entries up to the last of them.
        """
        assert isinstance(self.model, TreePasses)
        index = torch.arange(entries.shape[1], device=entries.device)
        path = torch.where(index < n_new[:, None], entries, -1)
        self.model.commit(start, path.repeat(len(start) // len(path), 1))

    def describe(self) -> None:
        """Fill in the statistics what the model says of its passes."""
        stats = self._stats
        setup = self.model.setup
        setup.spare = 0
        route = self.model.route
        if self._has_chunks and self._runner.is_static:
            stats.notes.append("prefill_chunk_size: passes with chunks ran eagerly")
        if route.attention is not None:
            reason = route.attention
            stats.attention = f"the model's own: {reason}" if reason else "window_attention"
        stats.route = route.name
        stats.route_reason = route.reason
        if setup.prefixes is not None:
            stats.notes.append(
                f"share_prefix: {setup.prefixes}; exact with respect to the model whose attention "
                "adds up a prompt and what follows it apart, which may change last bits; a model's "
                "first such call makes four short passes more, which are not counted, to check it"
            )
        elif setup.prefix_reason:
            stats.notes.append(f"share_prefix: each row stores its prompt: {setup.prefix_reason}")
        if route.shared_rounding:
            stats.exactness = "relaxed"
            stats.notes.append(route.shared_rounding)


class TreeScores(NamedTuple):
    """What a pass said of all entries of a tree.

    Attributes:
        target: `[B, E, V]`, of the target distribution.
        processed: `[B, E, V]`, before temperature and filters.
    """

    target: Tensor
    processed: Tensor


class ScorePasses:
    """Passes of the model over the window of a run.

    Args:
        calls: to the model.
        rows: of the run.
        params: sampling parameters.
        drafter: of the run, which may read scores.
        last_scores: `[B, V]`, scores of the right-most slot, for the next pass.

    Attributes:
        peak: `[B, W]`, the largest score of every slot of the last pass after all filters.
    """

    peak: Tensor
    _observed: PassScores

    def __init__(
        self,
        calls: ModelCalls,
        rows: RunRows,
        params: SamplingParams,
        *,
        drafter: Drafter,
        last_scores: Held,
    ) -> None:
        self.params = params
        self.last_scores = last_scores
        self.reads_last = drafter.source.reads_last_scores
        self._calls = calls
        self._rows = rows
        self._is_observed = drafter.source.reads_scores

    def logits(self) -> Tensor:
        """One forward pass over the window: raw logits `[R, W, V]` of all branches.

        The caller passes its result on to `record`.
        """
        inputs = self._rows.take_inputs()
        logits = self._calls.forward(Pass(inputs.tokens, inputs.start))
        if self._calls.recording is not None:
            self._calls.recording.record("logits", logits[: self._rows.prompt.batch])
        return logits

    def forward(self) -> Tensor:
        """One forward pass: scores `[B, W, V]` float32; see `WindowRun.forward`."""
        scores = self._to_scores(self.logits(), slice(None))
        self._keep(scores)
        return scores

    def _keep(self, scores: Tensor) -> None:
        self.peak = scores.amax(-1)
        if self.reads_last:
            self.last_scores.hold(scores[:, -1].clone())  # a view would keep the whole window's

    def forward_tree(self, tokens: Tensor, parents: Tensor, depths: Tensor) -> TreeScores:
        """One forward pass over the window and the branches behind it.

        Args:
            tokens: `[B, E]` int64; those of the window are in the token buffer, too.
            parents: `[B, E]` int64, see `Pass`.
            depths: `[B, E]` int64, slots between the window's first and the one that an entry
                predicts.
        """
        inputs = self._rows.take_inputs()
        prompt = self._rows.prompt
        buffer = self._rows.buffer
        slots = buffer.slots[:, :1] + depths
        width = inputs.tokens.shape[1]
        branches = prompt.branches
        behind = tokens[:, width:].repeat(branches, 1)
        entries = torch.cat([inputs.tokens, behind], 1)
        logits = self._calls.forward(
            Pass(entries, inputs.start, parents=parents.repeat(branches, 1))
        )
        self._calls.n_behind += behind.numel()
        processed = self.params.to_processed_scores(
            logits, branches, buffer.tokens, slots + buffer.origin, slots, prompt.layout
        )
        cooling = self.params.find_cooling(logits)
        target = self.params.finish_scores(processed, slots, prompt.layout, cooling)
        return TreeScores(target, processed)

    def keep(self, found: TreeScores, path: PassPath) -> None:
        """Go on as after a pass over the window alone, whose entries are those of a path."""
        rows = torch.arange(len(path.entries), device=path.entries.device)[:, None]
        scores = found.target[rows, path.entries]
        self._keep(scores)
        if self._is_observed:
            processed = found.processed[rows, path.entries]
            shown = scores if self.params.temperature else processed
            self._observed = PassScores(shown, processed[:, -1].clone(), path)

    def keep_accepted(self, scores: Tensor, n_new: Tensor) -> None:
        """Let the next drafts begin from the last accepted slot, and not from the right-most one,
        which depends on how many tokens other rows want.

        Args:
            scores: `[B, W, V]`, of the pass.
            n_new: `[B]` int64, tokens that were accepted.
        """
        if self.reads_last:
            rows = torch.arange(len(scores), device=scores.device)
            self.last_scores.hold(scores[rows, (n_new - 1).clamp(min=0)])

    def record(self, logits: Tensor, peak: Tensor, last: Tensor | None = None) -> None:
        """Record what `forward` records of its scores, where a kernel sampled without any.

        Args:
            logits: `[R, W, V]`, from `logits()`.
            peak: `[B, W]`, the largest score of every slot after all filters.
            last: `[B, V]`, the scores of the last slot, where the kernel wrote them.
        """
        self.peak = peak
        if not self.reads_last:
            return
        if last is None:
            last = self._to_scores(logits[:, -1:], slice(-1, None))[:, 0]
        self.last_scores.hold(last)

    def observed(self) -> PassScores | None:
        """What the drafter is shown of the last pass; None for one that reads no scores."""
        return self._observed if self._is_observed else None

    def _to_scores(self, logits: Tensor, part: slice) -> Tensor:
        """Logits of a part of the window's slots to scores of their target distribution."""
        buffer = self._rows.buffer
        prompt = self._rows.prompt
        columns = buffer.columns[:, part]
        slots = buffer.slots[:, part]
        processed = self.params.to_processed_scores(
            logits, prompt.branches, buffer.tokens, columns, slots, prompt.layout
        )
        cooling = self.params.find_cooling(logits)
        scores = self.params.finish_scores(processed, slots, prompt.layout, cooling)
        # at temperature 0 the target's scores are of one token
        shown = scores if self.params.temperature else processed
        if self._is_observed:
            self._observed = PassScores(shown, processed[:, -1].clone())
        if self._calls.recording is not None:
            self._calls.recording.record("scores", shown)
        return scores
