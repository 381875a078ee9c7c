"""Drafts one by one, each out of a few candidates for what follows the tokens before it.

`find_contexts` says where in some texts the last tokens stood before, `merge_votes` what these
occurrences say together; a `CandidateDrafter` makes chains, branches and children of that. Under a
bitwise policy a slot's frozen noise chooses among its candidates (Gumbel top-k); under one that is
exact in distribution a candidate is drawn, and the distribution of the candidates recorded. Texts
are of accepted tokens alone.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mmaccel.kernels.sample import argmax
from mmaccel.samplers.acceptance import draw
from mmaccel.samplers.drafting.contract import (
    Children,
    Drafter,
    Drafts,
    DraftSource,
    Nodes,
    OpenRun,
    Paths,
)

RANKS = 8  # candidates of a slot
_DOUBT = 0.5  # occurrences that say something else: one that agrees with itself is no certainty


class Texts(NamedTuple):
    """Where each row looks for its last tokens."""

    tokens: Tensor  # [B, T] int64, one text after the other; negative for none
    columns: Tensor  # [T] int64, of each token in its text. A context lies within one text.
    # [B, T] int64, which of two occurrences is read first, the larger; all different. -1: what
    # stands there must not be read.
    ranks: Tensor


class Contexts(NamedTuple):
    """What n candidates' slots of each row follow."""

    last: Tensor  # [B, n, L] int64, the tokens before the slot, the nearest last; -1 for none
    depths: Tensor  # [B, n] int64, number of the draft slot


def own_text(run: OpenRun) -> Texts:
    """What each row knows of itself: its prompt and the tokens that were accepted."""
    tokens = run.rows.tokens
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    is_known = columns < run.rows.columns[:, :1]
    return Texts(tokens, columns, torch.where(is_known, columns, -1))


def tokens_before(tokens: Tensor, first: Tensor, n: int) -> Tensor:
    """`[B, n]` int64, what stands before column `first` `[B, 1]` of `[B, N]`; -1 for nothing."""
    columns = first + torch.arange(-n, 0, device=tokens.device)
    return tokens.gather(1, columns.clamp(min=0)).where(columns >= 0, -1)


def find_suffix(tokens: Tensor, filled: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """The latest column `[B, 1]` behind the longest suffix of up to `reach` tokens before `filled`
    `[B, 1]` (where it never stood, the last token's), and how many agree, `[B]`.
    """
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    texts = Texts(tokens, columns, columns.where(columns < filled, -1))
    last = tokens_before(tokens, filled, reach)
    indices, is_there, lengths = find_contexts(texts, last[:, None], 1)
    return indices[:, 0].where(is_there[:, 0], filled - 1), lengths[:, 0]


def find_contexts(
    texts: Texts, last: Tensor, m: int, least: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the longest suffixes of contexts `[B, n, L]` stood before, at most m occurrences each,
    if at least `least` tokens agree.

    Returns:
        Indices `[B, n, m]` of what followed, largest ranks first; which there are, bool; and how
        many tokens agree, `[B, n]` int64.
    """
    reach = last.shape[2]
    # of each place t: whether its tokens t - 1, t - 2, … agree with the context, and how many do
    agrees = (texts.ranks >= 0)[:, None]  # [B, 1, T]
    n_agree = torch.zeros_like(texts.ranks)[:, None]
    for back in range(reach):
        sought = last[..., reach - 1 - back, None]  # [B, n, 1]
        before = texts.tokens.roll(1 + back, 1)[:, None]
        agrees = agrees & (before == sought) & (sought >= 0) & (texts.columns > back)
        n_agree = n_agree + agrees.long()
    longest = n_agree.amax(-1, keepdim=True)
    is_best = (n_agree == longest) & (longest >= least)
    ranks = texts.ranks[:, None].where(is_best, -1)
    best = ranks.topk(min(m, ranks.shape[2]), -1)
    return best.indices, best.values >= 0, longest[..., 0]


def vote(
    texts: Texts, contexts: Contexts, m: int, vocab_size: int, otherwise: Tensor | None = None
) -> Children:
    """What followed the longest suffixes of contexts, by up to m occurrences; else `otherwise`."""
    indices, is_there, _ = find_contexts(texts, contexts.last, m)
    tokens = texts.tokens.gather(1, indices.flatten(1)).view_as(indices)
    if otherwise is None:
        otherwise = contexts.last[..., -1]
    return merge_votes(tokens, is_there.float(), otherwise, vocab_size)


def merge_votes(tokens: Tensor, weights: Tensor, otherwise: Tensor, vocab_size: int) -> Children:
    """The candidates with the most votes; at a tie the first.

    Args:
        tokens: `[B, n, m]` int64, some of them the same.
        weights: `[B, n, m]` float32 >= 0, multiples of a power of two, so that sums are exact.
        otherwise: `[B, n]` int64, the only candidate where there is no vote.
    """
    tokens = tokens.clamp(0, vocab_size - 1)
    is_same = tokens[..., :, None] == tokens[..., None, :]  # [B, n, m, m]
    votes = (is_same * weights[..., None, :]).sum(-1)
    votes = votes.masked_fill(is_same.tril(-1).any(-1), 0.0)  # counted at the first of the same
    best = votes.sort(dim=-1, descending=True, stable=True)
    candidates = tokens.gather(2, best.indices)[..., :RANKS]
    log_probs = (best.values / (best.values.sum(-1, keepdim=True) + _DOUBT)).log()[..., :RANKS]

    # without a vote, one token that may be any of V
    is_known = best.values[..., :1] > 0
    otherwise = otherwise.clamp(0, vocab_size - 1)[..., None]
    guess = torch.full_like(log_probs, -math.inf)
    guess[..., 0] = -math.log(vocab_size)
    return Children(candidates.where(is_known, otherwise), log_probs.where(is_known, guess))


def order_by_noise(candidates: Children, noise: Tensor, depths: Tensor, k: int) -> Children:
    """The k candidates that noise prefers, and how likely each is then right."""
    values = candidates.log_probs + _take(noise, depths, candidates.tokens)
    best = values.sort(dim=-1, descending=True, stable=True)
    share = candidates.log_probs.logsumexp(-1, keepdim=True)  # that it is one of them at all
    share = share.clamp(max=0)  # kept in float16 they may add up to more
    log_probs = best.values.log_softmax(-1) + share
    return Children(candidates.tokens.gather(2, best.indices)[..., :k], log_probs[..., :k])


@dataclass(frozen=True)
class CandidateSource(DraftSource):
    is_capturable: ClassVar[bool] = True
    keeps_predictions: ClassVar[bool] = False
    reads_last_scores: ClassVar[bool] = False
    has_branches: ClassVar[bool] = True
    has_children: ClassVar[bool] = True


@dataclass(eq=False)
class CandidateDrafter(Drafter):
    reach: int  # L, tokens of a context

    @abstractmethod
    def candidates(self, run: OpenRun, contexts: Contexts) -> Children:
        """What may follow contexts, `[B, n, k]`, one at least with a finite log-probability."""

    def propose(self, run: OpenRun) -> Drafts:
        is_certain = run.policy.freezes_noise or run.params.temperature == 0
        noise = run.frozen_noise() if is_certain else None
        slots = run.rows.slots[:, :-1]
        last = self._known(run)  # [B, L]
        distributions = [
            torch.zeros(len(last), 0, run.vocab_size, device=last.device, dtype=torch.float32)
        ]
        chain = [last[:, :0]]
        for k in range(slots.shape[1]):
            depth = torch.full_like(last[:, :1], k)
            candidates = self.candidates(run, Contexts(last[:, None], depth))
            if noise is not None:
                values = candidates.log_probs + _take(noise, depth, candidates.tokens)
                best = run.backend.run(argmax, values)  # [B, 1]
            else:
                chances = candidates.log_probs.softmax(-1)
                uniforms = run.noise.fresh(slots[:, k : k + 1], run.rows.passes).drafts
                best = draw(chances, uniforms)
                empty = torch.zeros(
                    len(last), 1, run.vocab_size, device=last.device, dtype=torch.float32
                )
                distributions.append(empty.scatter_add(2, candidates.tokens, chances))
            token = candidates.tokens[:, 0].gather(1, best)
            chain.append(token)
            last = torch.cat([last, token], 1)[:, 1:]
        distribution = None if is_certain else torch.cat(distributions, 1)
        return Drafts(torch.cat(chain, 1), distribution=distribution)

    def children(self, run: OpenRun, paths: Paths, noise: Tensor, *, k: int) -> Children:
        known = self._known(run)[:, None].expand(-1, paths.tokens.shape[1], -1)
        texts = torch.cat([known, paths.tokens], 2)  # [B, n, L + W-1]
        # an entry with d drafts on its path follows columns d … d + L - 1 of these
        index = paths.depths[..., None] + torch.arange(self.reach, device=texts.device)
        candidates = self.candidates(run, Contexts(texts.gather(2, index), paths.depths))
        return order_by_noise(candidates, noise, paths.depths, k)

    def branch(
        self, run: OpenRun, drafts: Tensor, noise: Tensor, *, n_branches: int, length: int
    ) -> Nodes | None:
        """All other candidates at the first draft, then at the next ones."""
        number = torch.arange(n_branches, device=drafts.device)
        n_others = min(RANKS, run.vocab_size) - 1
        if n_others == 0:
            return None
        # branch b leaves at draft b // (n - 1), by candidate b % (n - 1) of those but the draft
        forks = (number // n_others).clamp(max=drafts.shape[1] - length).expand(len(drafts), -1)
        path = drafts[:, None].repeat(1, n_branches, 1)  # [B, N, W-1]
        candidates = self.children(run, Paths(path, forks), noise, k=RANKS)
        is_draft = candidates.tokens == drafts.gather(1, forks)[..., None]
        order = is_draft.long().argsort(dim=-1, stable=True)
        rank = (number % n_others).clamp(max=order.shape[2] - 1).expand(len(drafts), -1)
        token = candidates.tokens.gather(2, order.gather(2, rank[..., None]))  # [B, N, 1]
        tokens = [token]
        for step in range(1, length):
            path = path.scatter(2, forks[..., None] + step - 1, token)
            token = self.children(run, Paths(path, forks + step), noise, k=1).tokens
            tokens.append(token)
        return Nodes.of_branches(forks, torch.cat(tokens, 2), drafts.shape[1] + 1)

    def _known(self, run: OpenRun) -> Tensor:
        """`[B, L]` int64, the last tokens before the window; -1 where there are none."""
        return tokens_before(run.rows.tokens, run.rows.columns[:, :1], self.reach)


def _take(noise: Tensor, depths: Tensor, tokens: Tensor) -> Tensor:
    """The noise of tokens `[B, n, k]` in the draft slots `depths` `[B, n]`; zeros for none."""
    rows = torch.arange(len(tokens), device=tokens.device)[:, None, None]
    at = tokens if noise.shape[2] > 1 else torch.zeros_like(tokens)
    return noise[rows, depths[..., None], at]
