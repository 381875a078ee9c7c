"""ScorePasses: the forward passes of a run, and the scores of their target distributions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmaccel.contracts import Pass
from mmaccel.samplers.drafting.contract import Drafter, PassPath, PassScores
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.model_calls import ModelCalls
from mmaccel.samplers.window.rows import RunRows
from mmaccel.samplers.window.run_graphs import RunGraphs
from mmaccel.samplers.window.step_state import Held


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
        graphs: of the run, which keep the number format of the passes.

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
        graphs: RunGraphs,
    ) -> None:
        self.params = params
        self.last_scores = last_scores
        self.reads_last = drafter.source.reads_last_scores
        self._calls = calls
        self._rows = rows
        self._graphs = graphs
        self._is_observed = drafter.source.reads_scores

    def logits(self) -> Tensor:
        """One forward pass over the window: raw logits `[R, W, V]` of all branches.

        The caller passes its result on to `record`.
        """
        inputs = self._rows.take_inputs()
        logits = self._calls.forward(Pass(inputs.tokens, inputs.start))
        self._graphs.keep_arithmetic(self._calls.model, logits)
        if self._calls.is_recorded:
            self._calls.record("logits", logits[: self._rows.prompt.batch])
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

    def forward_tree(self, tokens: Tensor, parents: Tensor, slots: Tensor) -> TreeScores:
        """One forward pass over the window and the branches behind it.

        Args:
            tokens: `[B, E]` int64; those of the window are in the token buffer, too.
            parents: `[B, E]` int64, see `Pass`.
            slots: `[B, E]` int64, which each entry predicts.
        """
        inputs, prompt, buffer = self._rows.take_inputs(), self._rows.prompt, self._rows.buffer
        width, branches = inputs.tokens.shape[1], prompt.branches
        behind = tokens[:, width:].repeat(branches, 1)
        entries = torch.cat([inputs.tokens, behind], 1)
        logits = self._calls.forward(
            Pass(entries, inputs.start, parents=parents.repeat(branches, 1))
        )
        self._graphs.keep_arithmetic(self._calls.model, logits)
        self._calls.count_entries(behind.numel())
        processed = self.params.to_processed_scores(
            logits, branches, buffer.tokens, slots + buffer.origin, slots, prompt.layout
        )
        return TreeScores(self.params.finish_scores(processed, slots, prompt.layout), processed)

    def keep(self, found: TreeScores, path: PassPath) -> None:
        """Go on as after a pass over the window alone, whose entries are those of a path."""
        rows = torch.arange(len(path.entries), device=path.entries.device)[:, None]
        scores = found.target[rows, path.entries]
        self._keep(scores)
        if self._is_observed:
            processed = found.processed[rows, path.entries]
            shown = scores if self.params.temperature else processed
            self._observed = PassScores(shown, processed[:, -1].clone(), path)

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
        buffer, prompt = self._rows.buffer, self._rows.prompt
        columns, slots = buffer.columns[:, part], buffer.slots[:, part]
        processed = self.params.to_processed_scores(
            logits, prompt.branches, buffer.tokens, columns, slots, prompt.layout
        )
        scores = self.params.finish_scores(processed, slots, prompt.layout)
        # at temperature 0 the target's scores are of one token
        shown = scores if self.params.temperature else processed
        if self._is_observed:
            self._observed = PassScores(shown, processed[:, -1].clone())
        if self._calls.is_recorded:
            self._calls.record("scores", shown)
        return scores
