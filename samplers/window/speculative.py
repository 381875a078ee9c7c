"""Speculative decoding with a draft model, or with what the text itself repeats.

Y. Leviathan, M. Kalman, Y. Matias, ICML 2023 (arXiv 2211.17192), algorithm 1; C. Chen et al., 2023
(arXiv 2302.01318), algorithm 2. A small model drafts window - 1 tokens one by one, the large one
verifies them all in one pass. Without a draft model the drafts continue an earlier occurrence of
the last n-gram (A. Saxena, "Prompt Lookup Decoding", 2023), and their distribution is one-hot.

Departures: every row proceeds at its own pace; the draft model uses the target's sampling
parameters, guidance included; after a fully accepted window, the draft model processes the one
token it has not read together with the next, so that no pass is spent on catching up. Where a
prompt has images, the draft model reads the text alone, at positions of its own: images come from
the target, and drafts change speed only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor

from mmaccel.catalog import open_draft_model
from mmaccel.checks import show
from mmaccel.contracts import Pass, TokenModel
from mmaccel.errors import OptionError
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.acceptance import draw, is_kept, one_hot, residual
from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.window.run import WindowRun


@dataclass(frozen=True)
class Speculative(WindowPolicy):
    """Draft, verify, accept a prefix; the distribution of `Autoregressive`.

    Args:
        window: tokens that the target processes per pass; window - 1 of them are drafts.
        draft_model: a causal LM of transformers or a `TokenModel`, with the target's vocabulary, or
            None for prompt lookup. It reads no images: of a prompt with some, only the text.
    """

    window: int = 8
    draft_model: TokenModel | torch.nn.Module | None = field(default=None, repr=False)

    exactness: ClassVar[Exactness] = "distribution"
    drafts: ClassVar[str] = "ngram"

    def __post_init__(self) -> None:
        super().__post_init__()
        model = self.draft_model
        if model is None or isinstance(model, TokenModel):
            return
        if not isinstance(model, torch.nn.Module):
            raise OptionError(
                f"draft_model: expected a causal LM of transformers or None, received "
                f"{show(model)}; load it with AutoModelForCausalLM.from_pretrained"
            )
        object.__setattr__(self, "draft_model", open_draft_model(model))

    def decode(self, run: WindowRun) -> Generation:
        """See `WindowPolicy.decode`.

        Raises:
            OptionError: the draft model has another vocabulary.
        """
        drafter = cast("TokenModel | None", self.draft_model)
        if drafter is not None:
            if drafter.vocab_size != run.vocab_size:
                raise OptionError(
                    f"draft_model: expected a vocabulary of {run.vocab_size}, received "
                    f"{drafter.vocab_size}; take a draft model of the same family"
                )
            _prefill(drafter, run)
        while run.width:
            run.buffer.forget_drafts()
            if drafter is not None:
                drafts, p_draft = _draft(drafter, run)
            if drafter is None or run.is_retry:
                found = run.propose().tokens
                assert found is not None  # the n-gram source proposes tokens
                drafts = run.write_drafts(found)
                p_draft = one_hot(drafts, run.vocab_size)
            p_target = run.forward().softmax(-1)  # [B, W, V]
            fresh = run.noise.fresh(run.buffer.slots, run.counters.passes)
            accepted = is_kept(p_target[:, :-1], p_draft, drafts, fresh.coins[:, :-1])
            if drafter is not None and run.is_retry:  # which has not read these drafts
                accepted, p_draft = torch.zeros_like(accepted), torch.zeros_like(p_draft)
            rest = torch.cat([residual(p_target[:, :-1], p_draft), p_target[:, -1:]], 1)
            redrawn = draw(rest, fresh.redraws)  # [B, W]
            tokens = torch.where(accepted, drafts, redrawn[:, :-1])
            tokens = torch.cat([tokens, redrawn[:, -1:]], 1)
            run.accept(tokens, accepted)
            run.sync()
        return run.finish()


def _prefill(drafter: TokenModel, run: WindowRun) -> None:
    if run.scheduler is not None:
        run.scheduler.register(drafter)
    tokens, lengths = run.prompt.text
    drafter.reserve(tokens.shape[0], tokens.shape[1] + run.length - 1)
    if tokens.shape[1] > 1:
        drafter.prefill(Pass(tokens[:, :-1].clamp(min=0), torch.zeros_like(lengths)))
        run.stats.draft_passes += 1


def _draft(drafter: TokenModel, run: WindowRun) -> tuple[Tensor, Tensor]:
    """Drafts `[B, W-1]` one by one, and the distributions `[B, W-1, V]` they were drawn from."""
    buffer, prompt, passes = run.buffer, run.prompt, run.counters.passes  # [B]
    probabilities = []
    for k in range(run.width - 1):
        column, slots = buffer.columns[:, k : k + 1], buffer.slots[:, k : k + 1]
        logits = _draft_logits(drafter, run, k)
        scores = run.params.apply(
            logits, prompt.branches, buffer.tokens, column, slots, prompt.layout
        )
        probabilities.append(scores.softmax(-1))
        drafted = draw(probabilities[-1], run.noise.fresh(slots, passes).drafts)
        buffer.tokens.scatter_(1, column, drafted)
        run.stats.draft_passes += 1
    drafts = buffer.tokens.gather(1, buffer.columns[:, :-1])
    empty = drafts.new_zeros(drafts.shape[0], 0, run.vocab_size, dtype=torch.float32)
    return drafts, torch.cat([empty, *probabilities], 1)


def _draft_logits(drafter: TokenModel, run: WindowRun, k: int) -> Tensor:
    """Logits `[R, 1, V]` of the draft model for draft k of the window.

    The draft model may not have read the token before the last, so it processes both for k = 0. A
    row before its first pass has no such token: its second input is one that nothing reads. Columns
    and positions below 0 belong to rows that `on_step` ended before their first token.
    """
    buffer, branches, (_, lengths) = run.buffer, run.prompt.branches, run.prompt.text
    unread = (run.counters.passes > 0).long() if k == 0 else torch.zeros_like(buffer.n_generated)
    width = 2 if k == 0 and run.stats.passes > 0 else 1
    back = 1 + unread[:, None] - torch.arange(width, device=lengths.device)  # [B, width]
    columns = (buffer.columns[:, k : k + 1] - back).clamp(min=0)
    start = (lengths - 1 + (buffer.n_generated + k - unread).repeat(branches)).clamp(min=0)
    logits = drafter.forward(Pass(buffer.model_inputs(columns), start))  # [R, width, V]
    at = unread.repeat(branches)[:, None, None].expand(-1, 1, logits.shape[-1])
    return logits.gather(1, at)
