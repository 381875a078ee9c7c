"""Logits processors against repetition, evaluated over a window in one call.

`RepetitionAwareSampling`: S. Chen et al., "VALL-E 2: Neural Codec Language Models are Human Parity
Zero-Shot Text to Speech Synthesizers", 2024 (arXiv 2406.05370). A token y is drawn from the
nucleus; if it fills a share of the last K tokens, the token is drawn from the full distribution
instead. Given the prefix, the token has the distribution

    p(x) = nucleus(x) [x not repeated] + full(x) sum over repeated y of nucleus(y),

so every exact policy stays exact under it. As in CosyVoice (`ras_sampling` in
`cosyvoice/utils/common.py`), y is repeated if it occurs at least share * K times among the last
min(K, generated) tokens; a token is in the nucleus if the mass before it is below top_p and fewer
than top_k tokens precede it, both without temperature, the lowest id first at a tie.

`WindowedRepetitionPenalty`: N. S. Keskar et al., "CTRL: A Conditional Transformer Language Model
for Controllable Generation", 2019 (arXiv 1909.05858), section 4.1: scores of tokens that occurred
are divided by the penalty; of recent ones in speech models (OuteTTS: the last 64) and llama.cpp
(`repeat_last_n`, 64).

Departures:
    CosyVoice counts generated tokens only; here `start` says where they begin.
    Since February 2026 CosyVoice excludes the discarded token from the second draw:
    `redraw="others"`. Here it stays if no other is possible, where CosyVoice has no distribution
    left.
    As in transformers, the penalty multiplies scores below 0, so that above 1 it always makes a
    token less likely, and it applies once to a token however often it occurred.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import MISSING, dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.checks import ANY_INT, Checked, within

_WINDOW_HINT = "it counts recent tokens"


class WindowRule(Checked, ABC):
    """A logits processor for transformers that is defined over windows; a call is a window of 1."""

    @abstractmethod
    def over_window(self, scores: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
        """Scores `[B, W, V]` in their dtype after the rule. Position (b, w) has the prefix
        `tokens[b, :columns[b, w]]` of tokens `[B, N]`, columns `[B, W]`; ids outside 0..V-1 do not
        count.
        """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ends = input_ids.new_full((len(input_ids), 1), input_ids.shape[1])
        return self.over_window(scores[:, None], input_ids, ends)[:, 0]


def recent_tokens(
    tokens: Tensor,
    columns: Tensor,
    window: int,
    size: int,
    start: int = 0,
) -> Tensor:
    """The last tokens of each position's prefix (`over_window`), `[B, W, K]` int64, K = min(window,
    N); `size`, V, replaces ids outside the vocabulary (padding, for example) and columns before
    `start`.
    """
    n_back = min(window, tokens.shape[1])
    back = torch.arange(-n_back, 0, device=tokens.device)
    index = columns[..., None] + back  # [B, W, K]
    recent = tokens.gather(1, index.clamp(min=0).flatten(1)).view_as(index)
    counts = (index >= start) & (recent >= 0) & (recent < size)
    return recent.where(counts, size)


@dataclass(frozen=True)
class RepetitionAwareSampling(WindowRule):
    """A logits processor whose softmax is the distribution of repetition-aware sampling.

    Args:
        top_p: mass of the nucleus, in (0, 1].
        top_k: tokens of the nucleus at most, >= 1.
        window: K, recent tokens that count, >= 1.
        share: of the window that a repeated token fills, in (0, 1]; 0.1 of 10 tokens is one
            occurrence.
        start: column of the ids where counting begins; 0 counts the prompt too, the prompt's length
            (padding included) generated tokens only.
        redraw: "all" draws again from the full distribution (VALL-E 2), "others" from all tokens
            but the discarded one (CosyVoice since February 2026).
    """

    top_p: float = within(0.8, 0, 1, "1 keeps all", above_low=True)
    top_k: int = within(25, 1, hint="the vocabulary's size keeps all")
    window: int = within(10, 1, ANY_INT, _WINDOW_HINT)
    share: float = within(0.1, 0, 1, "1 requires a full window", above_low=True)
    start: int = within(0, hint="the prompt's length leaves the prompt out")
    redraw: Literal["all", "others"] = "all"

    def over_window(self, scores: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
        """Log-probabilities; -inf marks the impossible.

        Cost: one top-k; no host synchronisation; memory for B * W * (V + K) entries.
        """
        full = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        nucleus = self._nucleus(full)
        repeated = self._repeated(scores, tokens, columns)
        if self.redraw == "all":
            discarded = nucleus.where(repeated, 0).sum(-1, keepdim=True)
            probabilities = nucleus.masked_fill(repeated, 0) + full * discarded
            return probabilities.log().to(scores.dtype)
        rest = _mass_of_others(full)
        repeated = repeated & (rest > torch.finfo(rest.dtype).tiny)  # else no other is possible
        discarded = (nucleus / rest).where(repeated, 0)  # per unit of the others' mass
        redrawn = full * (discarded.sum(-1, keepdim=True) - discarded)
        return (nucleus.masked_fill(repeated, 0) + redrawn).log().to(scores.dtype)

    def _nucleus(self, full: Tensor) -> Tensor:
        """Distribution of the nucleus, `[B, W, V]`; at a tie, which topk leaves open, by id."""
        highest = full.topk(min(self.top_k, full.shape[-1]), dim=-1).values  # descending
        before = pad(highest.cumsum(-1)[..., :-1], (1, 0))  # the mass before each of them
        n_kept = (before < self.top_p).sum(-1, keepdim=True)
        least = highest.gather(-1, n_kept - 1)
        above = full > least
        level = full == least
        n_level = n_kept - above.sum(-1, keepdim=True)
        kept = full.where(above | (level & (level.cumsum(-1) <= n_level)), 0)
        return kept / kept.sum(-1, keepdim=True)

    def _repeated(self, scores: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
        size = scores.shape[-1]
        recent = recent_tokens(tokens, columns, self.window, size, self.start)
        counts = recent.new_zeros(*scores.shape[:-1], size + 1)
        counts = counts.scatter_add_(-1, recent, torch.ones_like(recent))[..., :size]
        return counts >= math.ceil(self.window * self.share)


def _mass_of_others(full: Tensor) -> Tensor:
    """1 - full, `[B, W, V]`; a sum for the likeliest token, where the difference would round."""
    peak = full.argmax(-1, keepdim=True)
    return (1 - full).scatter(-1, peak, full.scatter(-1, peak, 0).sum(-1, keepdim=True))


@dataclass(frozen=True)
class WindowedRepetitionPenalty(WindowRule):
    """A logits processor: the repetition penalty over the last `window` tokens, prompt included. As
    long as the prefix, it is transformers' own to the last bit, padding ids included.

    Args:
        penalty: above 0; more than 1 works against repetition, 1 changes nothing.
        window: at least 1, the recent tokens that count.
    """

    penalty: float = within(MISSING, 0, math.inf, "1 turns it off", above_low=True)
    window: int = within(MISSING, 1, ANY_INT, _WINDOW_HINT)

    def over_window(self, scores: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
        """Cost: no host synchronisation; memory for B * W * (V + min(window, N)) entries."""
        recent = recent_tokens(tokens, columns, self.window, scores.shape[-1])
        return _penalize(scores, recent, self.penalty)


def penalize_prefix(
    scores: Tensor, tokens: Tensor, columns: Tensor, *, penalty: float, ignored: int = 0
) -> Tensor:
    """transformers' `RepetitionPenaltyLogitsProcessor` at every position, as `over_window`;
    `ignored` leading columns do not count. Cost: no host synchronisation; memory for B * W * (V +
    N) entries.
    """
    before = recent_tokens(tokens, columns, tokens.shape[1], scores.shape[-1], ignored)
    return _penalize(scores, before, penalty)


def _penalize(scores: Tensor, tokens: Tensor, penalty: float) -> Tensor:
    """Penalize scores `[B, W, V]` of tokens `[B, W, K]` once each; V is no token."""
    padded = pad(scores, (0, 1))  # [B, W, V + 1]
    penalized = padded.gather(-1, tokens)
    penalized = torch.where(penalized < 0, penalized * penalty, penalized / penalty)
    return padded.scatter_(-1, tokens, penalized)[..., :-1]
