"""A small model that drafts token by token.

Y. Leviathan, M. Kalman, Y. Matias, ICML 2023 (arXiv 2211.17192), algorithm 1; C. Chen et al., 2023
(arXiv 2302.01318), algorithm 2.

Departures: every row proceeds at its own pace; the draft model uses the target's sampling
parameters, guidance included; under frozen noise a draft is what its scores and the slot's noise
choose; tokens that it has not read are read with the next ones, so that no pass is spent on
catching up. Of a prompt with images it reads the text alone. Under a tree it reads all of it again
for each generation of nodes. Beyond its positions a row has no drafts. A rule of length reads
temperature 1 where the target's is 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.catalog import open_draft_model
from mmaccel.checks import check_answer, check_kind, show, within
from mmaccel.contracts import Pass, TokenModel
from mmaccel.errors import OptionError
from mmaccel.samplers.acceptance import draw, one_hot
from mmaccel.samplers.arithmetic import as_called
from mmaccel.samplers.drafting.contract import Drafter, Drafts, DraftSource, OpenRun
from mmaccel.samplers.drafting.lengths.contract import Drafted, DraftLength, LengthJudge
from mmaccel.samplers.prompt_chunks import prefill_together
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.trees.contract import count_spare
from mmaccel.samplers.trees.entries import TreeEntries

if TYPE_CHECKING:
    from mmaccel.samplers.window.steps import Held


@dataclass(frozen=True)
class ModelSource(DraftSource):
    """Base of sources that draft by a small model with the target's vocabulary; OptionError: none.

    Args:
        model: a causal LM of transformers or a `TokenModel`. Its keys and values are the drafter's.
    """

    model: TokenModel = field(repr=False)

    reads_last_scores = False

    def __post_init__(self) -> None:
        model = open_model(f"{type(self).__name__}.model", self.model)
        object.__setattr__(self, "model", model)
        super().__post_init__()

    @property
    def other_model(self) -> TokenModel:
        return self.model


@dataclass(frozen=True)
class DraftModel(ModelSource):
    """Drafts of a small model, one by one.

    Args:
        model: a causal LM of transformers or a `TokenModel`. Its keys and values are the drafter's.
        length: when it stops before the window is full, such as `mmaccel.SVIP()`; None: never.

    Loses: where a draft is not several times cheaper than a pass.
    """

    length: DraftLength | None = within(
        None, hint="give a rule such as mmaccel.SVIP(), or leave length out"
    )

    @property
    def draws_trees(self) -> bool:
        return not self.model.lack("trees")

    def open(self, run: OpenRun) -> Drafter:
        """Cost: the prompt in a pass of the small model."""
        next_slot = run.steps.declare("next slot of the draft model")
        judge = None if self.length is None else self.length.open(run)
        if self.length is not None:
            check_kind(f"{type(self.length).__name__}.open", judge, LengthJudge)
        drafter = ModelDrafter(self, self.model, next_slot, judge)
        drafter.prefill(run)
        return drafter


def open_model(option: str, model: object) -> TokenModel:
    if isinstance(model, TokenModel):
        return model
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"{option}: expected a causal LM of transformers, received {show(model)}; load it "
            "with AutoModelForCausalLM.from_pretrained"
        )
    opened: TokenModel = open_draft_model(model)
    return opened


@dataclass(eq=False)
class ModelDrafter(Drafter):
    model: TokenModel  # its cache holds the rows of the run
    # [B] int64, the first slot whose token is not in its cache; -1: the last token of the prompt
    next_slot: Held
    judge: LengthJudge | None = None  # ends drafting before the window is full
    limit: float = math.inf  # positions of the model, where the run has more

    @as_called()
    def prefill(self, run: OpenRun) -> None:
        """Process the prompt's text without its last token, unless a scheduler does so."""
        if self.model.vocab_size != run.vocab_size:
            raise OptionError(
                f"draft_model: expected a vocabulary of {run.vocab_size}, received "
                f"{self.model.vocab_size}; take a draft model of the same family, or one that "
                "mmaccel.share_ids has given this vocabulary"
            )
        scheduler = run.scheduler
        size = run.model.setup.prefill_chunk_size
        if scheduler is not None:
            scheduler.register(self.model)
        tokens, lengths = run.prompt.text
        tree = run.policy.tree
        if tree is not None and self.source.draws_trees:
            width = run.policy.window
            assert isinstance(width, int), "checked with the tree"
            self.model.setup.spare = count_spare(tree, self.model, width)
        positions = tokens.shape[1] + run.length - 1
        most = self.model.max_positions
        if most is not None and positions > most:
            self.limit = positions = most
            self.note = f"no drafts beyond the {most} positions of the draft model"
        self.model.reserve(tokens.shape[0], positions)
        tokens = tokens[:, :-1][:, :positions]
        if tokens.shape[1] and (scheduler is None or size is None):
            lengths = (lengths - 1).clamp(max=tokens.shape[1])
            n_passes = prefill_together(self.model, tokens, lengths, size)
            run.stats.draft_passes += n_passes

    def has_room(self, run: OpenRun) -> Tensor:
        """`[B]` bool, whether the model has a position for the last known token."""
        _, lengths = run.prompt.text
        longest = lengths.view(run.prompt.branches, -1).amax(0)  # of a row's branches
        return longest - 1 + run.rows.n_generated < self.limit

    def propose(self, run: OpenRun) -> Drafts:
        """Beyond the model's positions drafts are whatever it says; certain, if no row has room."""
        if math.isfinite(self.limit) and not bool(self.has_room(run).any()):
            return Drafts(torch.zeros_like(run.rows.slots[:, 1:]))
        return self.draft(run)

    def draft(self, run: OpenRun) -> Drafts:
        rows, passes = run.rows, run.rows.passes  # [B]
        noise = run.frozen_noise() if run.policy.freezes_noise else None
        unread = self.unread(run)
        work = rows.tokens.clone()  # the token buffer with the drafts so far
        is_predicted = rows.is_predicted()
        empty = torch.zeros(len(work), 0, run.vocab_size, device=work.device, dtype=torch.float32)
        probabilities = [empty]  # of each draft, [B, 1, V]
        confidences = empty[:, :, 0]  # [B, k], of those drafted so far
        goes_on = ~run.rows.ended
        params = run.params
        if params.temperature == 0:  # of what a judge reads
            params = SamplingParams(params.guidance_scale, processor=params.processor)
        n_passes = 0
        for k in range(run.width - 1):
            column = rows.columns[:, k : k + 1]
            slots = rows.slots[:, k : k + 1]
            # behind a row's last draft, copies of the token before
            drawn = work.gather(1, (column - 1).clamp(min=0)).clamp(0, run.vocab_size - 1)
            certain = one_hot(drawn, run.vocab_size)
            judged = certain
            if self.judge is None or bool(goes_on.any()):
                logits = self._logits(run, work, k, unread if k == 0 else torch.zeros_like(unread))
                place = (run.prompt.branches, work, column, slots, run.prompt.layout)
                scores = run.params.apply(logits, *place)
                q = scores.softmax(-1)  # [B, 1, V]
                if noise is None:
                    new = draw(q, run.noise.fresh(slots, passes).drafts)
                else:
                    new = (scores + noise[:, k : k + 1]).argmax(-1)
                drawn = torch.where(goes_on[:, None], new, drawn)
                certain = torch.where(goes_on[:, None, None], q, certain)
                if self.judge is not None:
                    seen = q if params is run.params else params.apply(logits, *place).softmax(-1)
                    judged = torch.where(goes_on[:, None, None], seen, certain)
                n_passes += 1
            probabilities.append(certain)
            known = is_predicted[:, k : k + 1]
            work.scatter_(1, column, torch.where(known, work.gather(1, column), drawn))
            if self.judge is not None and n_passes == k + 1:
                confidence = judged[:, 0].gather(1, work.gather(1, column))
                confidences = torch.cat([confidences, confidence], 1)
                verdict = self.judge.goes_on(run, Drafted(judged[:, 0], confidences))
                name = f"{type(self.judge.rule).__name__}.goes_on"
                goes_on = goes_on & check_answer(name, verdict, goes_on.shape, "bool")
        run.stats.draft_passes += n_passes
        if n_passes:
            # beside a tree the accepted tokens may be others than the chain's, which were read
            n_read = n_passes - 1 if run.policy.tree is None else 0
            self.next_slot.hold(rows.slots[:, 0] + n_read)
        drafts = work.gather(1, rows.columns[:, :-1])
        return Drafts(drafts, distribution=torch.cat(probabilities, 1) if noise is None else None)

    def accepted(self, run: OpenRun, n_new: Tensor) -> None:
        if self.judge is not None:
            self.judge.accepted(run, n_new)

    def distributions(self, run: OpenRun, tokens: Tensor, parents: Tensor, first: int) -> Tensor:
        rows = run.rows
        branches = run.prompt.branches
        _, lengths = run.prompt.text
        depths = TreeEntries(tokens, parents, run.width).depths()
        last = rows.model_inputs(rows.columns[:, :1] - 1, rows.tokens)  # [R, 1]
        entries = torch.cat([last, tokens[:, 1:].repeat(branches, 1)], 1)
        start = (lengths - 1 + rows.n_generated.repeat(branches)).clamp(min=0)
        with as_called():
            logits = self.model.forward(Pass(entries, start, parents=parents.repeat(branches, 1)))
        run.stats.draft_passes += 1
        slots = rows.slots[:, :1] + depths
        columns = slots + rows.origin
        scores = run.params.apply(logits, branches, rows.tokens, columns, slots, run.prompt.layout)
        return scores[:, first:].softmax(-1)

    def close(self, run: OpenRun) -> None:
        if run.policy.tree is not None and self.source.draws_trees:
            self.model.setup.spare = 0

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        next_slot = self.next_slot.value
        if next_slot is not None:
            next_slot[batch_slots] = -1
        if self.judge is not None:
            self.judge.begin_rows(run, batch_slots)

    def unread(self, run: OpenRun) -> Tensor:
        """`[B]` int64, tokens before the last one that the model has not read, as behind a window
        that was accepted as a whole; none where it has no room for them.
        """
        n_generated = run.rows.n_generated
        next_slot = self.next_slot.value
        if next_slot is None:  # it has read the prompt alone
            next_slot = torch.full_like(n_generated, -1)
        unread = (n_generated - 1 - next_slot).clamp(min=0)
        return unread * self.has_room(run)

    def _logits(self, run: OpenRun, work: Tensor, k: int, unread: Tensor) -> Tensor:
        """Logits `[R, 1, V]` for draft k of the window, given the token buffer `work` with the
        drafts so far.

        `unread` `[B]` tokens before the last one are read as well. A row with fewer of them than
        another reads others behind its last one, which nothing sees. Columns and positions below 0
        belong to rows that `on_step` ended before their first token.
        """
        rows, branches, (_, lengths) = run.rows, run.prompt.branches, run.prompt.text
        width = 1 + int(unread.max())
        back = 1 + unread[:, None] - torch.arange(width, device=lengths.device)  # [B, width]
        columns = (rows.columns[:, k : k + 1] - back).clamp(min=0)
        start = (lengths - 1 + (rows.n_generated + k - unread).repeat(branches)).clamp(min=0)
        with as_called():  # [R, width, V]
            logits = self.model.forward(Pass(rows.model_inputs(columns, work), start))
        at = unread.repeat(branches)[:, None, None].expand(-1, 1, logits.shape[-1])
        return logits.gather(1, at)
