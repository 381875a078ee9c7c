"""Speculative decoding with a draft model, or with what the text itself repeats.

Y. Leviathan, M. Kalman, Y. Matias, ICML 2023 (arXiv 2211.17192), algorithm 1; C. Chen et al., 2023
(arXiv 2302.01318), algorithm 2. A small model drafts window - 1 tokens one by one, the large one
judges them all in one pass. Without a draft model the drafts continue an earlier occurrence of the
last n-gram (A. Saxena, "Prompt Lookup Decoding", 2023); their law is one-hot.

Departures: rows advance at their own pace; the draft model sees the same filters as the target,
guidance included; after a fully accepted window its one unread token is fed together with the next,
so that no pass is spent on catching up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.contracts import Prompt, TokenModel, check_window
from mmaccel.errors import OptionError
from mmaccel.results import Exactness, Generation, OnStep
from mmaccel.samplers.acceptance import count_leading, draw, is_kept, one_hot, residual
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.run import WindowRun


@dataclass(frozen=True)
class Speculative:
    """Draft, judge, keep the prefix; the plain loop's law.

    Args:
        window: tokens fed per pass of the target; window - 1 of them are drafts.
        draft_model: a `TokenModel` with the target's vocabulary, or None for prompt lookup.
    """

    window: int = 8
    draft_model: TokenModel | None = field(default=None, repr=False)

    exactness: ClassVar[Exactness] = "distribution"

    def __post_init__(self) -> None:
        check_window(self.window, adaptive=False)
        if self.draft_model is not None and not isinstance(self.draft_model, TokenModel):
            raise OptionError(
                f"draft_model: expected a TokenModel or None, received "
                f"{type(self.draft_model).__name__}; wrap a transformers model in "
                "mmaccel.CausalLMWindow"
            )

    def sample(
        self,
        model: TokenModel,
        prompt: Prompt,
        length: int,
        *,
        params: SamplingParams,
        noise: Noise,
        on_step: OnStep | None = None,
    ) -> Generation:
        """Make up to `length` tokens a row; see `mmaccel.contracts.Policy.sample`.

        Raises:
            OptionError: if the draft model has another vocabulary.
        """
        drafter = self.draft_model
        if drafter is not None and drafter.vocab_size != model.vocab_size:
            raise OptionError(
                f"draft_model: expected a vocabulary of {model.vocab_size}, received "
                f"{drafter.vocab_size}; take a draft model of the same family"
            )
        run = WindowRun(
            self,
            model,
            prompt,
            length,
            params=params,
            noise=noise,
            on_step=on_step,
            window=self.window,
            drafts="ngram",
        )
        if drafter is not None:
            _prefill(drafter, run)
        while run.width:
            run.forget_drafts()
            if drafter is None:
                found = run.propose().tokens
                assert found is not None  # the n-gram source answers with tokens
                drafts = run.write_drafts(found)
                p_draft = one_hot(drafts, run.vocab_size)
            else:
                drafts, p_draft = _draft(drafter, run)
            p_target = run.forward().softmax(-1)  # [B, W, V]
            fresh = run.noise.fresh(run.slots, run.counters.passes)
            kept = is_kept(p_target[:, :-1], p_draft, drafts, fresh.coins[:, :-1])
            rest = torch.cat([residual(p_target[:, :-1], p_draft), p_target[:, -1:]], 1)
            redrawn = draw(rest, fresh.redraws)  # [B, W]
            tokens = torch.cat([torch.where(kept, drafts, redrawn[:, :-1]), redrawn[:, -1:]], 1)
            run.commit(tokens, 1 + count_leading(kept))
        return run.generation()


def _prefill(drafter: TokenModel, run: WindowRun) -> None:
    if run.scheduler is not None:
        run.scheduler.join(drafter)
    tokens, lengths = run.prompt.tokens, run.prompt.lengths
    drafter.reserve(tokens.shape[0], tokens.shape[1] + run.length - 1)
    if tokens.shape[1] > 1:
        drafter.prefill(tokens[:, :-1].clamp(min=0), torch.zeros_like(lengths))
        run.stats.draft_passes += 1


def _draft(drafter: TokenModel, run: WindowRun) -> tuple[Tensor, Tensor]:
    """Drafts `[B, W-1]` one by one, and the laws `[B, W-1, V]` they were drawn from."""
    branches, passes = run.prompt.branches, run.counters.passes  # [B]
    laws = []
    for k in range(run.width - 1):
        column, slots = run.columns[:, k : k + 1], run.slots[:, k : k + 1]
        logits = _read(drafter, run, k)
        scores = run.params.apply(
            logits, branches, run.token_buffer, column, slots, run.prompt.layout
        )
        laws.append(scores.softmax(-1))
        drafted = draw(laws[-1], run.noise.fresh(slots, passes).drafts)
        run.token_buffer.scatter_(1, column, drafted)
        run.stats.draft_passes += 1
    drafts = run.token_buffer.gather(1, run.columns[:, :-1])
    empty = drafts.new_zeros(drafts.shape[0], 0, run.vocab_size, dtype=torch.float32)
    return drafts, torch.cat([empty, *laws], 1)


def _read(drafter: TokenModel, run: WindowRun, k: int) -> Tensor:
    """Logits `[R, 1, V]` of the draft model for draft k of the window.

    It may not have read the token before the last, so both are fed. A row before its first pass has
    none: it is fed its last one and a token that counts nothing. What is below 0 belongs to rows
    that `on_step` ended before their first token.
    """
    branches, lengths = run.prompt.branches, run.prompt.lengths
    behind = (run.counters.passes > 0).long() if k == 0 else torch.zeros_like(run.made)  # [B]
    width = 2 if k == 0 and run.stats.passes > 0 else 1
    back = 1 + behind[:, None] - torch.arange(width, device=lengths.device)  # [B, width]
    columns = (run.columns[:, k : k + 1] - back).clamp(min=0)
    start = (lengths - 1 + (run.made + k - behind).repeat(branches)).clamp(min=0)
    logits = drafter.forward(run.window_inputs(columns), start)  # [R, width, V]
    at = behind.repeat(branches)[:, None, None].expand(-1, 1, logits.shape[-1])
    return logits.gather(1, at)
