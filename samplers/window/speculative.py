"""Speculative decoding: all drafts of a pass are new, and the speculative rule accepts a prefix.

Y. Leviathan, M. Kalman, Y. Matias, ICML 2023 (arXiv 2211.17192), algorithm 1; C. Chen et al., 2023
(arXiv 2302.01318), algorithm 2. A small model drafts window - 1 tokens one by one
(`mmaccel.samplers.drafting.draft_model`), the large one verifies them all in one pass. Without a
draft model a source drafts, at first `mmaccel.samplers.drafting.ngram`, which continues an earlier
occurrence of the last n-gram; tokens that it is certain of have a one-hot distribution.

Departures: every row proceeds at its own pace; see also those of the draft sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, cast

import torch
from torch import Tensor

from mmaccel.catalog import open_draft_model
from mmaccel.checks import show
from mmaccel.contracts import TokenModel
from mmaccel.errors import OptionError
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.acceptance import draw, is_kept, one_hot, residual
from mmaccel.samplers.drafting.contract import DraftSource
from mmaccel.samplers.drafting.sources import draft_by
from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.window.run import WindowRun


@dataclass(frozen=True)
class Speculative(WindowPolicy):
    """Draft, verify, accept a prefix; the distribution of `Autoregressive`.

    Args:
        window: tokens that the target processes per pass; window - 1 of them are drafts.
        draft_model: a causal LM of transformers or a `TokenModel`, with the target's vocabulary, or
            None for `drafts`. It reads no images: of a prompt with some, only the text.
        drafts: where drafts come from without a draft model, a draft source or its name: "ngram",
            prompt lookup, or "vegas", the model itself over part of its cache.
    """

    window: int = 8
    draft_model: TokenModel | torch.nn.Module | None = field(default=None, repr=False)
    drafts: str | DraftSource = "ngram"

    exactness: ClassVar[Exactness] = "distribution"
    takes_corrections: ClassVar[bool] = False

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

    def draft_source(self) -> DraftSource:
        if self.draft_model is None:
            return super().draft_source()
        return draft_by(cast(TokenModel, self.draft_model))

    def decode(self, run: WindowRun) -> Generation:
        while run.width:
            run.buffer.forget_drafts()
            drafts, p_draft = _drafts(run)
            p_target = run.forward().softmax(-1)  # [B, W, V]
            run.observe(None)
            fresh = run.noise.fresh(run.buffer.slots, run.counters.passes)
            accepted = is_kept(p_target[:, :-1], p_draft, drafts, fresh.coins[:, :-1])
            if run.is_retry:  # no draft model has read these drafts
                accepted = torch.zeros_like(accepted)
                p_draft = torch.zeros_like(p_draft)
            rest = torch.cat([residual(p_target[:, :-1], p_draft), p_target[:, -1:]], 1)
            redrawn = draw(rest, fresh.redraws)  # [B, W]
            tokens = torch.where(accepted, drafts, redrawn[:, :-1])
            tokens = torch.cat([tokens, redrawn[:, -1:]], 1)
            run.accept(tokens, accepted)
            run.sync()
        return run.finish()


def _drafts(run: WindowRun) -> tuple[Tensor, Tensor]:
    """Drafts `[B, W-1]`, and the distributions `[B, W-1, V]` from which they were drawn."""
    found = run.propose()
    tokens = found.tokens
    p_draft = found.distribution
    if tokens is None:
        assert found.scores is not None
        p_draft = found.scores.softmax(-1).expand(-1, run.width - 1, -1)
        tokens = draw(p_draft, run.fresh_noise().drafts[:, :-1])
    drafts = run.write_drafts(tokens)
    return drafts, one_hot(drafts, run.vocab_size) if p_draft is None else p_draft
