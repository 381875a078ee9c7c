"""The Frechet profile: as many of the surest slots as can still be each other's likeliest tokens.

C. Wu et al., "Fast-dLLM", 2025, arXiv 2505.22618, section 3.3, theorem 1 and the rule "factor", for
the whole profile of confidences in the place of the weakest one (compare S. R. Kasa et al.,
"Fast-dLLM++: Frechet Profile Decoding for Faster Diffusion LLM Inference", 2026, arXiv 2606.02955).

Let e_1 <= ... <= e_n be what the likeliest tokens of n slots lack to probability 1. Whatever the
joint law, all of them together have at least 1 - (e_1 + ... + e_n), by the union bound, and any
other choice differs at some slot i, so that it has at most e_i <= e_n. Where e_1 + ... + e_n + e_n
< 1 the product's likeliest choice is therefore the joint law's only one; at equality another can
be as likely. The rule asks for sum + e_n <= factor. With equal e it is (n + 1) e <= factor, where
"factor" asks (n + 1) e_n < factor of every profile: as the sum is at most n e_n, it takes all that
"factor" takes.

Departures: derived here, so that constants may differ from the paper's; equality is let in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmaccel.samplers.evidence import Evidence
from mmaccel.samplers.select import LogitsOnly, Memory, ranked
from mmaccel.samplers.select_checks import check_number


@dataclass(frozen=True)
class FrechetProfile(LogitsOnly):
    """The longest prefix of the surest slots that stays within `factor`; one slot always does.

    Up to factor 1 the tokens, taken greedily, are the likeliest of the slots' joint law.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        check_number("factor", self.factor, 0, float("inf"), "1 is the theorem's")

    def select(self, seen: Evidence, memory: Memory) -> Tensor:
        """See `Selector`."""
        turns = ranked(seen.peak, seen.is_open)
        lacks = torch.where(seen.is_open, 1 - seen.peak.double(), 0.0)
        lacks = torch.empty_like(lacks).scatter_(1, turns, lacks)  # ascending
        fits = lacks.cumsum(1) + lacks <= self.factor
        n = fits.int().cumprod(1).sum(1, keepdim=True)
        return seen.is_open & (turns < n.clamp(min=1))

    def rank(self, seen: Evidence) -> Tensor:
        """See `Selector`."""
        return seen.peak
