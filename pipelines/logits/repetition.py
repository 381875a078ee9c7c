"""Repetition-aware sampling as a law: a nucleus draw, drawn again if the token was repeated.

S. Chen et al., "VALL-E 2: Neural Codec Language Models are Human Parity Zero-Shot Text to Speech
Synthesizers", 2024 (arXiv 2406.05370), repetition-aware sampling. A token y is drawn from the
nucleus; if it fills a share of the last K tokens, it is thrown away and the token is drawn from the
full law. Given the prefix, the token that comes out has the law

    p(x) = nucleus(x) [x not repeated] + full(x) sum over repeated y of nucleus(y),

so the rule is an ordinary processor and every exact policy stays exact under it.

What counts as repeated, and what as the nucleus, follows the code of CosyVoice (`ras_sampling` in
`cosyvoice/utils/common.py`): y is repeated if it occurs at least share * K times among the last
min(K, made) tokens; a token is in the nucleus if the mass before it is below top_p and fewer than
top_k tokens stand before it, both on the untempered law, the lowest id first at a tie.

Departures: CosyVoice counts generated tokens only, which a processor cannot tell from the prompt;
that is what `start` is for. Since February 2026 CosyVoice leaves the thrown token out of the second
draw; that is `redraw="others"`. There the token stays if no other is possible, where CosyVoice has
no law left.

The last tokens before every entry of a window, gathered without a loop over positions.

The repetition penalty, over the last tokens or over the whole prefix, for a window at once.

N. S. Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable Generation",
2019 (arXiv 1909.05858), section 4.1: scores of tokens that occurred are divided by the penalty.
Speech models (OuteTTS: the last 64) and llama.cpp (`repeat_last_n`, 64) count recent tokens only.

Departures: as in transformers, scores below 0 are multiplied, so that a penalty above 1 always
makes a token less likely; a token is punished once, however often it occurred.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.errors import OptionError


class WindowRule(ABC):
    """A logits processor for transformers that is defined over windows: a position is one of 1."""

    @abstractmethod
    def over_window(self, scores: Tensor, line: Tensor, columns: Tensor) -> Tensor:
        """Scores `[B, W, V]`, line `[B, N]`, columns `[B, W]` to `[B, W, V]`: a `Processor`."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Ids `[B, T]` int64 and scores `[B, V]` to `[B, V]`."""
        ends = input_ids.new_full((len(input_ids), 1), input_ids.shape[1])
        return self.over_window(scores[:, None], input_ids, ends)[:, 0]


def recent_tokens(line: Tensor, columns: Tensor, window: int, size: int, start: int = 0) -> Tensor:
    """The last tokens of every entry's prefix.

    Args:
        line: `[B, N]` int64, the prefix of entry (b, w) is `line[b, :columns[b, w]]`.
        columns: `[B, W]` int64 in 0..N.
        window: how many tokens to look back.
        size: V; stands in the answer for what is no token of the vocabulary (padding, ids the head
            cannot make) and for columns before the prefix.
        start: >= 0; columns before this one do not count.

    Returns:
        `[B, W, K]` int64 in 0..V with K = min(window, N).

    Cost: memory for B * W * K ids.
    """
    reach = min(window, line.shape[1])
    back = torch.arange(-reach, 0, device=line.device)
    index = columns[..., None] + back  # [B, W, K]
    tokens = line.gather(1, index.clamp(min=0).flatten(1)).view_as(index)
    counts = (index >= start) & (tokens >= 0) & (tokens < size)
    return tokens.where(counts, size)


def check_window(window: Any) -> None:
    """Raise OptionError unless the window is an integer >= 1."""
    if not isinstance(window, Integral) or isinstance(window, bool) or window < 1:
        raise OptionError(
            f"window: expected an integer >= 1, received {window!r}; it counts the tokens looked "
            "back at"
        )


@dataclass(frozen=True)
class RepetitionAwareSampling(WindowRule):
    """A logits processor whose softmax is the law of repetition-aware sampling.

    Args:
        top_p: mass of the nucleus, in (0, 1].
        top_k: tokens of the nucleus at most, >= 1.
        window: K, tokens looked back at, >= 1.
        share: of the window that makes a token a repeated one, in (0, 1]; the default of 0.1 of 10
            tokens is a single occurrence.
        start: column of the ids where counting begins; 0 counts the prompt too, the prompt's length
            (padding included) generated tokens only.
        redraw: "all" draws again from the full law (VALL-E 2), "others" from all tokens but the one
            thrown away (CosyVoice since February 2026).

    Raises:
        OptionError: for a value outside its domain.
    """

    top_p: float = 0.8
    top_k: int = 25
    window: int = 10
    share: float = 0.1
    start: int = 0
    redraw: Literal["all", "others"] = "all"

    def __post_init__(self) -> None:
        for name, use in (("top_p", "1 keeps all"), ("share", "1 asks for a full window")):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number or not 0 < float(value) <= 1:
                raise OptionError(f"{name}: expected a number in (0, 1], received {value!r}; {use}")
            object.__setattr__(self, name, float(value))
        if not _is_whole(self.top_k) or self.top_k < 1:
            raise OptionError(
                f"top_k: expected an integer >= 1, received {self.top_k!r}; the vocabulary's size "
                "keeps all"
            )
        check_window(self.window)
        if not _is_whole(self.start) or self.start < 0:
            raise OptionError(
                f"start: expected an integer >= 0, received {self.start!r}; give the prompt's "
                "length to count generated tokens only"
            )
        if self.redraw not in ("all", "others"):
            raise OptionError(
                f"redraw: expected 'all' or 'others', received {self.redraw!r}; 'all' is VALL-E 2's"
            )

    def over_window(self, scores: Tensor, line: Tensor, columns: Tensor) -> Tensor:
        """All entries of a window; a `Processor` (see `mmaccel.samplers.sampling_params`).

        Args:
            scores: `[B, W, V]`, any float dtype.
            line: `[B, N]` int64; ids outside 0..V-1 are passed over.
            columns: `[B, W]` int64, length of each entry's prefix in `line`.

        Returns:
            `[B, W, V]` log-probabilities, the dtype of `scores`; -inf marks the impossible.

        Cost: one top-k; no host synchronisation; memory for B * W * (V + K) entries.
        """
        full = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        nucleus, repeated = self._nucleus(full), self._repeated(scores, line, columns)
        if self.redraw == "all":
            thrown = nucleus.where(repeated, 0)
            law = nucleus.masked_fill(repeated, 0) + full * thrown.sum(-1, keepdim=True)
            return law.log().to(scores.dtype)
        rest = _mass_of_others(full)
        repeated = repeated & (rest > torch.finfo(rest.dtype).tiny)  # else no other is possible
        thrown = (nucleus / rest).where(repeated, 0)  # per unit of the others' mass
        law = nucleus.masked_fill(repeated, 0) + full * (thrown.sum(-1, keepdim=True) - thrown)
        return law.log().to(scores.dtype)

    def _nucleus(self, full: Tensor) -> Tensor:
        """The nucleus' law, `[B, W, V]`; ties are cut by id, which top-k leaves open."""
        highest = full.topk(min(self.top_k, full.shape[-1]), dim=-1).values  # falling
        before = pad(highest.cumsum(-1)[..., :-1], (1, 0))
        n_kept = (before < self.top_p).sum(-1, keepdim=True)
        least = highest.gather(-1, n_kept - 1)
        above, level = full > least, full == least
        n_level = n_kept - above.sum(-1, keepdim=True)
        kept = full.where(above | (level & (level.cumsum(-1) <= n_level)), 0)
        return kept / kept.sum(-1, keepdim=True)

    def _repeated(self, scores: Tensor, line: Tensor, columns: Tensor) -> Tensor:
        """Which tokens are thrown away, `[B, W, V]` bool."""
        size = scores.shape[-1]
        recent = recent_tokens(line, columns, self.window, size, self.start)
        counts = recent.new_zeros(*scores.shape[:-1], size + 1)
        counts = counts.scatter_add_(-1, recent, torch.ones_like(recent))[..., :size]
        return counts >= math.ceil(self.window * self.share)


def _mass_of_others(full: Tensor) -> Tensor:
    """1 - full, `[B, W, V]`; by addition for the likeliest token, where 1 - full would round."""
    peak = full.argmax(-1, keepdim=True)
    return (1 - full).scatter(-1, peak, full.scatter(-1, peak, 0).sum(-1, keepdim=True))


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class WindowedRepetitionPenalty(WindowRule):
    """A logits processor: the repetition penalty over the last `window` tokens, prompt included.

    With a window as long as the prefix it is transformers' `RepetitionPenaltyLogitsProcessor` to
    the last bit, padding ids included.

    Args:
        penalty: > 0; above 1 against repetition, 1 changes nothing.
        window: >= 1, tokens looked back at.

    Raises:
        OptionError: for a value outside its domain.
    """

    penalty: float
    window: int

    def __post_init__(self) -> None:
        is_number = isinstance(self.penalty, Real) and not isinstance(self.penalty, bool)
        if not is_number or not 0 < self.penalty < math.inf:
            raise OptionError(
                f"penalty: expected a finite number > 0, received {self.penalty!r}; 1 turns it off"
            )
        object.__setattr__(self, "penalty", float(self.penalty))
        check_window(self.window)

    def over_window(self, scores: Tensor, line: Tensor, columns: Tensor) -> Tensor:
        """All entries of a window; a `Processor` (see `mmaccel.samplers.sampling_params`).

        Args:
            scores: `[B, W, V]`, any float dtype.
            line: `[B, N]` int64; ids outside 0..V-1 are passed over.
            columns: `[B, W]` int64, length of each entry's prefix in `line`.

        Returns:
            `[B, W, V]`, the dtype of `scores`.

        Cost: no host synchronisation; memory for B * W * (V + min(window, N)) entries.
        """
        recent = recent_tokens(line, columns, self.window, scores.shape[-1])
        return _punish(scores, recent, self.penalty)


def punish_prefix(
    scores: Tensor, line: Tensor, columns: Tensor, *, penalty: float, ignored: int = 0
) -> Tensor:
    """What transformers' `RepetitionPenaltyLogitsProcessor` gives at every entry of a window.

    Args:
        scores: `[B, W, V]`, any float dtype.
        line: `[B, N]` int64; ids outside 0..V-1 are passed over.
        columns: `[B, W]` int64, length of each entry's prefix in `line`.
        penalty: > 0.
        ignored: leading columns that do not count.

    Returns:
        `[B, W, V]`, the dtype of `scores`.

    Cost: no host synchronisation; memory for B * W * (V + N) entries.
    """
    before = recent_tokens(line, columns, line.shape[1], scores.shape[-1], ignored)
    return _punish(scores, before, penalty)


def _punish(scores: Tensor, tokens: Tensor, penalty: float) -> Tensor:
    """Scores `[B, W, V]`, tokens `[B, W, K]` in 0..V, where V is none; once for each token."""
    padded = pad(scores, (0, 1))  # [B, W, V + 1]
    found = padded.gather(-1, tokens)
    found = torch.where(found < 0, found * penalty, found / penalty)
    return padded.scatter_(-1, tokens, found)[..., :-1]
