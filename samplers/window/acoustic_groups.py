"""Principled coarse-graining (PCG): accept a draft by its groups of like codes. Relaxed.

M. Yanuka, P. Dixon, E. Finkelshtein, D. Rotman, R. Giryes, "Principled Coarse-Grained Acceptance
for Speculative Decoding in Speech" (arXiv 2511.13732). Around every code lies a group, the codes
closer to it than a radius. Groups overlap, and a token's probability is split evenly over its
owners, the n groups that it is in: P(k) = sum of p(t) / n(t) over group k, Q(k) likewise. A draft
x ~ q is given one of its owners at random and accepted with probability min(1, P(k) / Q(k)). Else
a group k is drawn from (P - Q)+, and of its tokens one by p(t) / n(t).

With a(t) and b(t), the means over t's owners of min(1, P / Q) and min(1, Q / P), a slot's token is
distributed as q a + p (1 - b), its group as P; the total variation is the sum of (q a - p b)+,
which `Stats.total_variation` reports.

Departures: no owner is drawn: a draft is accepted with a(x) and replaced by p (1 - b), which is the
same without the paper's repeated tries. A token that filters or a layout exclude is never accepted:
q counts where p is above 0. Drafts after the first rejection are redrawn with an exact coupling.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmaccel.checks import one_of, within
from mmaccel.contracts import Prompt, TokenModel
from mmaccel.errors import OptionError
from mmaccel.kernels.acceptance import exact_rule
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.acceptance import Coupling, at_tokens
from mmaccel.samplers.drafting.contract import DraftSource
from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.window.run import WindowRun
from mmaccel.samplers.window.speculative_jacobi import iterate
from mmaccel.samplers.window.token_groups import TokenGroups, find_codes, group_tokens

_OTHER = {"embeddings": "codes", "codes": "embeddings"}
_known: WeakKeyDictionary[Any, tuple[Hashable, TokenGroups]] = WeakKeyDictionary()  # by model


@dataclass(frozen=True)
class AcousticGroups(WindowPolicy):
    """PCG: accepts a code by its groups of like codes. Given the tokens before it a slot's group is
    distributed as the model says; its code is not, nor is a sequence of groups. Reports that.

    Args:
        window: tokens processed per pass.
        radius: codes closer than this are in a group; 0 is the exact rule. Of "embeddings" it is 1
            minus the cosine (the paper: 0.55 to 0.62), of "codes" Euclidean.
        vectors: of the tokens: "embeddings", the model's own, or "codes", those of its codec.
        coupling: redraw of drafts after the first rejection, as in `SpeculativeJacobi`.
        drafts: where drafts come from, as in `SpeculativeJacobi`.

    Codes are tokens that the layout, if any, allows and that end no row; others are groups of their
    own. Under `attach` a model with words needs its `layout=mmaccel.Frames(…)`.

    Loses: against `GroupedSpeculative` on `voices`, which has as many tokens a pass with fewer
    errors; from a radius of 0.7 on; on deep codebooks, whose embeddings are nearly orthogonal; on
    wide vocabularies, where the first call computes all distances. Models of several codebooks a
    step are refused; steps are not captured.
    Figures: `voices`, window 8: 2.32 tokens a pass at 0.6 (`Jacobi` 1.91) for 2.9 points more phone
    errors.
    """

    window: int = 16
    radius: float = within(0.6, hint="0.6 is usual, 0 is exact")
    vectors: str = one_of("embeddings", tuple(_OTHER))
    coupling: Coupling = "maximal"
    drafts: str | DraftSource = "neighbour"

    exactness: ClassVar[Exactness] = "relaxed"

    def decode(self, run: WindowRun) -> Generation:
        if self.radius == 0:
            return iterate(run, self.coupling, exact_rule)
        groups = self.find_groups(run.model, run.prompt)
        rule = partial(self.rule, groups=groups)
        return iterate(run, self.coupling, rule, rest=partial(self.rest, groups=groups))

    def find_groups(self, model: TokenModel, prompt: Prompt) -> TokenGroups:
        """The groups of a model's tokens, kept until others of the model are asked for."""
        vectors = model.vectors(self.vectors)
        if vectors is None or len(vectors) != model.vocab_size:
            other = _OTHER[self.vectors]
            remedy = "" if model.vectors(other) is None else f"choose {other!r}, or "
            raise OptionError(
                f"vectors: expected a model with a vector for each of its {model.vocab_size} "
                f"tokens for {self.vectors!r}, received a {type(model).__name__} without them; "
                f"{remedy}take GroupedSpeculative()"
            )
        is_code = find_codes(prompt, model.vocab_size)
        ramp = torch.linspace(1, 2, len(vectors), device=vectors.device, dtype=torch.float32)
        content = ramp @ vectors.detach().float().nan_to_num()  # weights may change in place
        asked = (self.vectors, self.radius, is_code.device)
        key = (*asked, *(part.cpu().numpy().tobytes() for part in (is_code, content)))
        owner = model if model.model is None else model.model  # which outlives its windows
        known = _known.get(owner)
        if known is None or known[0] != key:
            vectors = vectors.to(is_code.device)
            by_angle = self.vectors == "embeddings"
            known = (key, group_tokens(vectors, is_code, self.radius, by_angle=by_angle))
            _known[owner] = known
        return known[1]

    def rule(
        self, p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor, groups: TokenGroups
    ) -> tuple[Tensor, Tensor]:
        """Accept drafts `[B, K]` with a(x); which, and the total variation `[B, K]` spent."""
        a, b = _weigh(p_target, p_draft, groups)
        spent = (p_draft * a - p_target * b).clamp(min=0.0).sum(-1)
        return coins < at_tokens(a, drafts), spent

    def rest(self, p_target: Tensor, p_draft: Tensor, groups: TokenGroups) -> Tensor:
        """p (1 - b) `[B, K, V]`, from which the token is drawn that replaces a rejected draft."""
        _, b = _weigh(p_target, p_draft, groups)
        return p_target * (1 - b).clamp(min=0.0)


def _weigh(p_target: Tensor, p_draft: Tensor, groups: TokenGroups) -> tuple[Tensor, Tensor]:
    """a and b of every token, `[B, K, V]` each; a is 0 where p is."""
    is_excluded = p_target == 0
    of_target, of_draft = groups.split(
        torch.stack([p_target, p_draft.masked_fill(is_excluded, 0.0)])
    )
    ratios = torch.stack([of_target / of_draft, of_draft / of_target])
    a, b = groups.average(ratios.clamp(max=1.0).nan_to_num(nan=1.0))  # 0 / 0: nothing is drawn
    return a.masked_fill(is_excluded, 0.0), b
