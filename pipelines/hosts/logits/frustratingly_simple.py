"""Frustratingly simple decoding (FSD): what an n-gram model of the text so far expects, is avoided.

H. Yang et al., "A Frustratingly Simple Decoding Method for Neural Text Generation", 2023 (arXiv
2302.12021), section 3, with the constants and the smoothing of the authors' code (LHRYANG/FSD): the
score of one of the k likeliest tokens v is

    (1 - alpha) p(v) - alpha q(v),

and the token of the highest score is taken. q is an n-gram model of the row's own prefix. From the
longest context down to none, a context c that v followed adds r beta count(c v) / (count(c) + 1) to
q(v), and r, 1 at first, is multiplied by 1 - beta; without a context it is r count(v) / count().
The result depends on the prefix alone: every exact policy stays exact under it.

Departures: the authors' smaller weight for stop words is left out, which needs a list of them. The
paper takes the highest score (temperature 0); at another temperature T tokens are drawn from the
softmax of score / T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.checks import within
from mmaccel.kernels.truncation import NEVER
from mmaccel.pipelines.hosts.logits.repetition import WindowRule


@dataclass(frozen=True)
class FrustratinglySimple(WindowRule):
    """A logits processor: frustratingly simple decoding, the discrete variant.

    Args:
        alpha: weight of the penalty, in 0..1; 0 leaves the order of the likeliest tokens as it is.
        top_k: tokens that may be taken, at least 1.
        n: length of the n-grams, at least 1.
        beta: share of the longest context in the n-gram model, in 0..1.
    """

    alpha: float = within(0.4, 0, 1, "0.4 is usual")
    top_k: int = within(3, 1, hint="3 is usual")
    n: int = within(2, 1, hint="2 or 3 is usual")
    beta: float = within(0.9, 0, 1, "0.9 is usual")

    def over_window(self, scores: Tensor, tokens: Tensor, columns: Tensor) -> Tensor:
        """Ids outside 0..V-1 are in no n-gram; -inf marks what is outside the k likeliest tokens.

        Cost: no host synchronisation; memory for B * W * (V + N) entries, n times.
        """
        p = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        least = p.topk(min(self.top_k, p.shape[-1]), dim=-1).values[..., -1:]
        penalty = self._expect(tokens, columns, p.shape[-1]).to(p.dtype)
        mixed = (1 - self.alpha) * p - self.alpha * penalty
        return mixed.masked_fill(p < least, NEVER).to(scores.dtype)

    def _expect(self, tokens: Tensor, columns: Tensor, size: int) -> Tensor:
        """The n-gram model q of every position's prefix, `[B, W, V]` float32."""
        known = tokens.where((tokens >= 0) & (tokens < size), size)
        index = torch.arange(tokens.shape[1], device=tokens.device)
        # [B, W, N]: a token lies in the prefix, and the context before it is the prefix's own
        follows = (index < columns[..., None]) & (known < size)[:, None]
        levels = [follows]
        for back in range(1, self.n):
            # the token `back` before each one, and that of the end of each prefix
            before = pad(known, (back, 0), value=size)[:, : known.shape[1]]
            last = known.gather(1, (columns - back).clamp(min=0))
            is_there = (columns >= back) & (last < size)
            follows = follows & is_there[..., None] & (before[:, None] == last[..., None])
            levels.append(follows)
        penalty = torch.zeros(*columns.shape, size, device=tokens.device, dtype=torch.float32)
        r = torch.ones_like(penalty)
        for back in range(self.n - 1, -1, -1):
            counts = self._count(levels[back], known, size)
            total = counts.sum(-1, keepdim=True)
            share = r * counts / (total + 1) * self.beta
            if back == 0:
                share = r * counts / total.clamp(min=1)
            penalty = penalty + share
            r = torch.where(counts > 0, r * (1 - self.beta), r)
        return penalty

    @staticmethod
    def _count(follows: Tensor, known: Tensor, size: int) -> Tensor:
        """How often each token stands where `follows` `[B, W, N]` says so: `[B, W, V]` float32."""
        ids = known[:, None].expand_as(follows)
        counts = torch.zeros(*follows.shape[:2], size + 1, device=known.device, dtype=torch.float32)
        return counts.scatter_add_(-1, ids, follows.float())[..., :-1]
