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
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.errors import OptionError
from mmaccel.pipelines.recent_tokens import WindowRule, check_window, recent_tokens


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
        """All entries of a window; a `Processor` (see `mmaccel.samplers.filters`).

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
