"""The passes of a window run: what is asked of the model, and the scores that come of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import OutOfMemoryError, Tensor

from mmaccel.contracts import Pass
from mmaccel.model_parts import CapturedBuffers, MixedPasses, PromptPiece, TreePasses
from mmaccel.samplers.arithmetic import PassFormats, as_called
from mmaccel.samplers.drafting.contract import PassPath, PassScores
from mmaccel.samplers.prompt_chunks import count_prompts, prefill_together
from mmaccel.samplers.trees.contract import count_spare
from mmaccel.samplers.window.step_runner import Once

if TYPE_CHECKING:
    from mmaccel.samplers.window.run import WindowRun


class TreeScores(NamedTuple):
    """What a pass said of all entries of a tree, `[B, E, V]`."""

    target: Tensor  # of the target distribution
    processed: Tensor  # before temperature and filters


class RunPasses:
    """The passes of one run."""

    peak: Tensor  # [B, W], the largest score of every slot of the last pass after all filters
    _observed: PassScores

    def __init__(self, run: WindowRun) -> None:
        self.model = run.model
        recorder = run.model.setup.recorder
        self.recording = recorder if recorder is not None and recorder.is_active else None
        self.formats = PassFormats(run.model)
        self.has_own_prompt = False  # whether the model itself has processed the prompt
        self.knows_first = False  # whether the logits behind the prompt were computed with it
        self.pieces: Sequence[PromptPiece] = ()  # of prompts, which the next pass processes, too
        self.n_behind = 0  # entries of all rows that the last pass had beside its window
        self.last_scores = run.last_scores  # [B, V], of the right-most slot, for the next pass
        self.reads_last = run.drafter.source.reads_last_scores
        self._is_observed = run.drafter.source.reads_scores
        self._has_chunks = False  # whether prompts are processed in chunks
        tree = run.policy.tree
        self._spare = 0 if tree is None else count_spare(tree, run.model, run.chooser.widest)
        self._params = run.params
        self._rows = run.rows
        self._runner = run.runner
        self._steps = run.steps
        self._stats = run.stats

    def begin(self, run: WindowRun) -> None:
        """Reserve the cache and run the prompt, in most models without its last token; where the
        scheduler lets prompts be processed between steps, until one is whole.
        """
        scheduler = run.scheduler
        tokens: Tensor | None = run.prompt.tokens  # [R, N]
        if scheduler is not None and scheduler.feeds_all:
            tokens = None
        elif scheduler is not None and scheduler.is_endless:  # with room for longer ones
            tokens = run.prompt.tokens[:, : int(run.prompt.lengths.max())]
        self._open(tokens)
        if scheduler is not None and tokens is None and not self.has_own_prompt:
            scheduler.begin(run)
            run.chooser.go_on(scheduler.n_decoding, 0)

    def _open(self, tokens: Tensor | None) -> None:
        """`_begin`, once more if memory lacked and the graphs of other runs had some."""
        try:
            self._begin(tokens)
            return
        except OutOfMemoryError:
            if not self._runner.free_memory():
                raise
        self._begin(tokens)  # here, as the handler still refers to the tensors of the failed pass

    @as_called()
    def _begin(self, tokens: Tensor | None) -> None:
        setup = self.model.setup
        setup.spare = self._spare
        lengths = self._rows.lengths
        self._runner.reserve(self.model, len(lengths), self._steps.capacity.positions)
        began = time.perf_counter()
        cost = self.model.process_prompt()
        self.has_own_prompt = cost is not None
        self.knows_first = self.has_own_prompt or self.model.takes_whole_prompts
        n_left = 0 if self.knows_first else 1  # tokens that the first window reads
        n_processed, n_passes = (None, 1) if cost is None else cost
        has_size = setup.prefill_chunk_size is not None
        self._has_chunks = n_processed is None and tokens is None and has_size
        if n_processed is None and tokens is not None and tokens.shape[1] > n_left:
            n_columns = tokens.shape[1] - n_left
            n_passes = self._prefill(tokens[:, :n_columns], lengths - n_left)
            n_processed = count_prompts(self.model, tokens) * n_columns
        if n_processed is not None:
            self._stats.forward_seconds += time.perf_counter() - began
            self._stats.prefill_passes += n_passes
            self._stats.tokens_processed += n_processed

    def _prefill(self, tokens: Tensor, lengths: Tensor) -> int:
        """Prefill with `[R, N]`, of a short prompt in a step of its own; returns the passes."""
        size = self.model.setup.prefill_chunk_size
        n_tokens = count_prompts(self.model, tokens) * tokens.shape[1]
        self._has_chunks = size is not None and n_tokens > size
        short_prompt = self._steps.short_prompt
        if short_prompt is None or self._has_chunks:
            chunk_size = size if self._has_chunks else None
            return prefill_together(self.model, tokens, lengths, chunk_size)
        assert isinstance(self.model, CapturedBuffers)
        width = self.model.prompt_width(tokens.shape[1])

        def step() -> None:
            start = lengths.new_zeros(1).expand_as(lengths)
            tokens = short_prompt[:, :width].clamp(min=0)
            self.model.prefill(Pass(tokens, start, lengths=lengths, opens=True))

        self._runner.run_step(Once("prompt", width), step)
        return 1

    def logits(self, entries: Pass | None = None) -> Tensor:
        """One pass over the window, or over other `entries`: raw logits `[R, W, V]`, which go on to
        `record`.
        """
        if entries is None:
            inputs = self._rows.take_inputs()
            entries = Pass(inputs.tokens, inputs.start)
        logits = self._compute(entries)
        if self.recording is not None:
            self.recording.record("logits", logits[: self._rows.prompt.batch])
        return logits

    def forward(self) -> Tensor:
        """One forward pass: scores `[B, W, V]` float32."""
        scores = self._to_scores(self.logits(), slice(None))
        self._keep(scores)
        return scores

    def _keep(self, scores: Tensor) -> None:
        self.peak = scores.amax(-1)
        if self.reads_last:
            self.last_scores.hold(scores[:, -1].clone())  # a view would keep the whole window's

    def forward_tree(
        self, tokens: Tensor, parents: Tensor, depths: Tensor, nodes: Tensor | None = None
    ) -> TreeScores:
        """One forward pass over the window and the branches behind it.

        Args:
            tokens: `[B, E]` int64; those of the window are in the token buffer, too.
            parents: `[B, E]` int64, see `Pass`.
            depths: `[B, E]` int64, slots from the window's first to the one predicted.
            nodes: `[n]` int64, numbers of those behind the window that are computed; None: all.
        """
        rows = self._rows
        prompt = rows.prompt
        inputs = rows.take_inputs()
        slots = rows.slots[:, :1] + depths
        width = inputs.tokens.shape[1]
        branches = prompt.branches
        behind = tokens[:, width:].repeat(branches, 1)
        entries = torch.cat([inputs.tokens, behind], 1)
        wanted = None
        n_behind = behind.numel()
        if nodes is not None:
            number = torch.arange(entries.numel(), device=entries.device)
            number = number.view(branches, *tokens.shape)  # [G, B, E], entries of the pass
            chosen = number[..., width:].flatten(1)[:, nodes].flatten()  # of every branch
            wanted = torch.cat([number[..., :width].flatten(), chosen])
            n_behind = len(chosen)
        logits = self._compute(
            Pass(entries, inputs.start, parents=parents.repeat(branches, 1), wanted=wanted)
        )
        self.n_behind += n_behind
        processed = self._params.to_processed_scores(
            logits, branches, rows.tokens, slots + rows.origin, slots, prompt.layout
        )
        cooling = self._params.find_cooling(logits)
        target = self._params.finish_scores(processed, slots, prompt.layout, cooling)
        return TreeScores(target, processed)

    def keep(self, tree: TreeScores, path: PassPath) -> None:
        """Go on as after a pass over the window alone, whose entries are those of a path."""
        rows = torch.arange(len(path.entries), device=path.entries.device)[:, None]
        scores = tree.target[rows, path.entries]
        self._keep(scores)
        if self._is_observed:
            processed = tree.processed[rows, path.entries]
            shown = scores if self._params.temperature else processed
            self._observed = PassScores(shown, processed[:, -1].clone(), path)

    def keep_accepted(self, scores: Tensor, n_new: Tensor) -> None:
        """Let the next drafts begin from the last of `n_new` accepted slots."""
        # not from the right-most one, which depends on how many tokens other rows want
        if self.reads_last:
            rows = torch.arange(len(scores), device=scores.device)
            self.last_scores.hold(scores[rows, (n_new - 1).clamp(min=0)])

    def record(self, logits: Tensor, peak: Tensor, last: Tensor | None = None) -> None:
        """As `forward` does of its scores, where a kernel sampled without any: their `peak`
        `[B, W]`, and the scores `last` `[B, V]` of the last slot, where the kernel wrote them.
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
        rows = self._rows
        prompt = rows.prompt
        columns = rows.columns[:, part]
        slots = rows.slots[:, part]
        processed = self._params.to_processed_scores(
            logits, prompt.branches, rows.tokens, columns, slots, prompt.layout
        )
        cooling = self._params.find_cooling(logits)
        scores = self._params.finish_scores(processed, slots, prompt.layout, cooling)
        # at temperature 0 the target's scores are of one token
        shown = scores if self._params.temperature else processed
        if self._is_observed:
            self._observed = PassScores(shown, processed[:, -1].clone())
        if self.recording is not None:
            self.recording.record("scores", shown)
        return scores

    def commit(self, path: Tensor) -> None:
        """Tell the model which tree entries were accepted, the first `n_new` of `path` `[B, W]`."""
        assert isinstance(self.model, TreePasses)
        rows = self._rows
        index = torch.arange(path.shape[1], device=path.device)
        path = torch.where(index < rows.n_new[:, None], path, -1)
        self.model.commit(rows.first_positions(), path.repeat(rows.prompt.branches, 1))

    def _compute(self, entries: Pass) -> Tensor:
        began = time.perf_counter()
        pieces = self.pieces
        self.pieces = ()
        self.n_behind = sum(len(piece.tokens) for piece in pieces)
        with self.formats.passing():
            if pieces or entries.wanted is not None:
                assert isinstance(self.model, MixedPasses)
                logits = self.model.forward_mixed(entries, pieces).detach()
            else:
                logits = self.model.forward(entries).detach()
        self.formats.note(logits)
        self._stats.forward_seconds += time.perf_counter() - began
        return logits

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
