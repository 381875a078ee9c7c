"""The contract of sibling rules: several drafts of one slot, of which one or none is accepted.

At each entry the walk hands a rule the target distribution p, the drafter's q, and the drafts x_1 …
x_K that were drawn from q to follow it. The rule accepts one, or draws another token. Whatever q
is, the token is distributed as p. What a rule says depends on the drafts of that one slot alone:
the longest path would prefer tokens with a better continuation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from mmaccel.checks import Checked
from mmaccel.samplers.acceptance import draw, residual
from mmaccel.samplers.noise import Noise, Stream


class Choice(NamedTuple):
    """What follows an entry of each row."""

    sibling: Tensor  # [R] int64, which of the siblings was accepted; -1 for none
    tokens: Tensor  # [R] int64, its token, or the one that was drawn instead


class Uniforms(NamedTuple):
    """Fresh numbers in (0, 1) for one slot of each row."""

    coins: Tensor  # [R, K], decide about the siblings
    redraws: Tensor  # [R], draw a token where none is accepted


@dataclass(frozen=True)
class SlotNoise:
    noise: Noise  # of the rows
    slots: Tensor  # [B, n] int64, which the siblings predict
    step: Tensor  # [B] int64, passes of each row so far

    def gumbel(self, vocab_size: int) -> Tensor:
        """`[B, n, V]`."""
        return self.noise.gumbel(self.slots, vocab_size, Stream.SIBLINGS, self.step)

    def uniforms(self, n_values: int) -> Tensor:
        """`[B, n, k]`."""
        return self.noise.uniforms(self.slots, n_values, Stream.SIBLINGS, self.step)


@dataclass(frozen=True)
class SiblingRule(Checked, ABC):
    """Base of sibling rules: how siblings are drawn, and which one is accepted."""

    name: ClassVar[str] = ""

    @abstractmethod
    def draw(self, p_draft: Tensor, noise: SlotNoise, k: int, first: Tensor | None) -> Tensor:
        """K siblings behind n entries, `[B, n, K]` int64, drawn from q `[B, n, V]`; -1: cannot be
        drawn. `first` `[B, n]` int64 is x_1, drawn from q with other noise; None: drawn, too.
        """

    @abstractmethod
    def choose(
        self, p_target: Tensor, p_draft: Tensor, siblings: Tensor, uniforms: Uniforms
    ) -> Choice:
        """Accept a sibling or draw another token, by p `[R, V]` and q `[R, V]`; `siblings` `[R, K]`
        int64 are as `draw` has drawn them, -1 where there is none.
        """


def choose_in_turn(
    p_target: Tensor,
    p_draft: Tensor,
    siblings: Tensor,
    uniforms: Uniforms,
    next_draft: Callable[[Tensor, Tensor], Tensor],
) -> Choice:
    """Recursive rejection: x_k is accepted with probability min(1, p_k(x_k) / q_k(x_k)).

    Where it is rejected, p_(k+1) is (p_k - q_k)+, normalised: the residual of the Leviathan rule
    becomes the target of the next sibling, and q_(k+1) is `next_draft(q_k [R, V], x_k [R, 1])`.
    Where all are, a token is drawn from the last residual.
    """
    chosen = torch.full_like(siblings[:, 0], -1)
    for k in range(siblings.shape[1]):
        token = siblings[:, k : k + 1]
        at = token.clamp(min=0)
        is_open = (token[:, 0] >= 0) & (chosen < 0)
        weight = uniforms.coins[:, k] * p_draft.gather(1, at)[:, 0]
        is_taken = is_open & (weight < p_target.gather(1, at)[:, 0])
        # all other rows go on with what the sibling has left of p and of q
        rest = residual(p_target, p_draft)
        rest = rest / rest.sum(-1, keepdim=True)
        is_rejected = (is_open & ~is_taken)[:, None]
        p_target = torch.where(is_rejected, rest, p_target)
        p_draft = torch.where(is_rejected, next_draft(p_draft, at), p_draft)
        chosen = torch.where(is_taken, k, chosen)
    return take(chosen, siblings, p_target, uniforms.redraws)


def take(chosen: Tensor, siblings: Tensor, rest: Tensor, redraws: Tensor) -> Choice:
    """The chosen of siblings `[R, K]`, or a token drawn from the weights `rest` `[R, V]`."""
    drawn = draw(rest[:, None], redraws[:, None])[:, 0]
    accepted = siblings.gather(1, chosen.clamp(min=0)[:, None])[:, 0]
    return Choice(chosen, torch.where(chosen >= 0, accepted, drawn))
