"""Token recycling: drafts follow the likeliest successor of each token, as earlier passes had it.

X. Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with
Token Recycling", ACL 2025 (arXiv 2408.08696), section 3. Every pass scores what follows each of its
tokens, wrong drafts included; a table keeps that by token.

Departures: a window is a chain, which reads the likeliest successor alone; the paper's eight are
kept where a tree asks for them, and its children follow in the order in which the noise of their
slot prefers them. A row has a table of its own, which begins empty, so that its passes are the same
in any batch. A token that was not seen yet is its own successor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmaccel.kernels.sample import argmax
from mmaccel.samplers.drafting.contract import (
    Children,
    Drafter,
    Drafts,
    DraftSource,
    Nodes,
    OpenRun,
    PassScores,
    Paths,
)
from mmaccel.samplers.drafting.memory.candidates import order_by_noise

if TYPE_CHECKING:
    from mmaccel.samplers.window.steps import Held


_RANKS = 8  # successors of a token that a tree is made of


@dataclass(frozen=True)
class TokenRecycling(DraftSource):
    """A draft source for text: the likeliest successor of each token, as the row's passes had it.

    Memory: 4 bytes for each row and token of the vocabulary, 48 bytes where a tree asks for them.
    Loses: on images, at high temperatures, and beside the fused sampling kernel of GPUs, as it
    reads all scores.
    """

    is_capturable = True
    learns_guesses = True
    keeps_predictions = False
    reads_last_scores = False
    reads_scores = True
    has_branches = True
    has_children = True
    name = "token-recycling"

    def open(self, run: OpenRun) -> Drafter:
        n_ranks = 1 if run.policy.tree is None else _RANKS
        return RecyclingDrafter(
            self,
            successors=run.steps.declare("successors"),
            log_probs=run.steps.declare("log-probabilities of successors"),
            n_ranks=min(n_ranks, run.vocab_size),
        )


@dataclass(eq=False)
class RecyclingDrafter(Drafter):
    # [B, V + 1, n] int32, the likeliest tokens after each one; the last entry is for tokens outside
    # of the vocabulary, and for what is not kept
    successors: Held
    log_probs: Held  # [B, V + 1, n] float16, of these; only where n is more than 1
    n_ranks: int  # n

    def propose(self, run: OpenRun) -> Drafts:
        frontier = run.frontier()
        table, _ = self._tables(run)
        token = frontier.token_buffer.gather(1, frontier.filled[:, None] - 1)  # [B, 1], the last
        token = token.clamp(max=frontier.vocab_size)
        chain = [token[:, :0]]
        for _ in range(frontier.slots.shape[1]):
            token = self._follow(table, token)
            chain.append(token)
        return Drafts(torch.cat(chain, 1))

    def branch(
        self, run: OpenRun, drafts: Tensor, noise: Tensor, *, n_branches: int, length: int
    ) -> Nodes | None:
        table, _ = self._tables(run)
        n_others = self.n_ranks - 1
        if n_others == 0:
            return None
        # branch b: at draft k, the successor of rank 1 + b % (n - 1) of the token before
        number = torch.arange(n_branches, device=drafts.device)
        k = (number // n_others).clamp(max=drafts.shape[1] - length)
        before = run.rows.tokens.gather(1, run.rows.columns[:, :-1] - 1)  # [B, W-1]
        before = before.clamp(max=run.vocab_size)[:, k]  # [B, N]
        rows = torch.arange(len(drafts), device=drafts.device)[:, None]
        token = table[rows, before, 1 + number % n_others].long()
        tokens = [token]
        for _ in range(length - 1):
            token = self._follow(table, token)
            tokens.append(token)
        forks = k.expand(len(drafts), -1)
        return Nodes.of_branches(forks, torch.stack(tokens, 2), drafts.shape[1] + 1)

    def children(self, run: OpenRun, paths: Paths, noise: Tensor, *, k: int) -> Children:
        last = run.rows.tokens.gather(1, run.rows.columns[:, :1] - 1)  # [B, 1]
        known = torch.cat([last[:, None].expand(-1, paths.tokens.shape[1], -1), paths.tokens], 2)
        token = known.gather(2, paths.depths[..., None])[..., 0]  # [B, n]
        token = token.clamp(max=run.vocab_size)
        rows = torch.arange(len(token), device=token.device)[:, None]
        table, log_table = self._tables(run)
        successors = Children(table[rows, token].long(), log_table[rows, token].float())
        return order_by_noise(successors, noise, paths.depths, k)

    def _follow(self, table: Tensor, tokens: Tensor) -> Tensor:
        return table[..., 0].gather(1, tokens).long()

    def observe(self, run: OpenRun, scores: PassScores, noise: Tensor | None) -> None:
        table, log_table = self._tables(run)
        rows = run.rows
        n_ids = run.vocab_size
        # where a branch won, its tokens are what the scores follow
        tokens = rows.tokens if scores.path is None else scores.path.tokens
        read = tokens.gather(1, rows.columns - 1).clamp(max=n_ids)  # [B, W]
        read = read.masked_fill(run.rows.is_over(rows.slots), n_ids)
        # where a token stands several times in the window, the last one counts
        width = read.shape[1]
        is_later = torch.ones(width, width, dtype=torch.bool, device=read.device).triu(1)
        is_repeated = ((read[:, :, None] == read[:, None, :]) & is_later).any(-1)  # [B, W]
        if self.n_ranks == 1:
            likeliest = run.backend.run(argmax, scores.window)[..., None]  # [B, W, 1]
        else:
            best = scores.window.topk(self.n_ranks, -1)
            likeliest = best.indices
        index = read.masked_fill(is_repeated, n_ids)[..., None].expand_as(likeliest)
        if self.n_ranks > 1:
            log_probs = best.values - scores.window.logsumexp(-1, keepdim=True)
            self.log_probs.hold(log_table.scatter(1, index, log_probs.half()))
        table.scatter_(1, index, likeliest.int())
        self.successors.hold(table)

    def begin_rows(self, run: OpenRun, batch_slots: Tensor) -> None:
        for held, empty in zip((self.successors, self.log_probs), self._empty(run)):
            if held.value is not None:
                held.get()[batch_slots] = empty

    def _tables(self, run: OpenRun) -> tuple[Tensor, Tensor]:
        """Successors and their log-probabilities, which are empty before the first pass."""
        if self.successors.value is None:
            successors, log_probs = (
                each.repeat(run.prompt.batch, 1, 1) for each in self._empty(run)
            )
            return successors, log_probs
        successors = self.successors.get()
        return successors, self.log_probs.get() if self.n_ranks > 1 else successors

    def _empty(self, run: OpenRun) -> tuple[Tensor, Tensor]:
        """`[V + 1, n]` each: every token is its own successor, one of V, the others are none."""
        device = run.rows.tokens.device
        index = torch.arange(run.vocab_size + 1, dtype=torch.int32, device=device)
        successors = (index % run.vocab_size)[:, None].repeat(1, self.n_ranks)
        log_probs = torch.full_like(successors, float("-inf"), dtype=torch.float16)
        log_probs[:, :1].fill_(-math.log(run.vocab_size))
        return successors, log_probs
