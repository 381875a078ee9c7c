"""Speculative Jacobi decoding: drafts from the last pass's laws, kept by the speculative acceptance
rule.

SJD: Y. Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free
Speculative Jacobi Decoding", ICLR 2025 (arXiv 2410.01699), section 3. Coupled redraws: "MC-SJD:
Maximal Coupling Speculative Jacobi Decoding", arXiv 2510.24211, sections 4.1 (maximal) and 4.2
(Gumbel).

A pass gives the target law p of every slot. Left to right, the draft of a slot is kept with
probability min(1, p/q), q being the law it was drawn from; the first slot that fails is redrawn
from (p - q)+ and ends the run of kept tokens. Slots behind it stay drafts and are redrawn from
their new p, which becomes their recorded q:

- independent: afresh (SJD);
- maximal: the old draft with probability min(1, p/q), else (p - q)+, so that as few as possible
  change;
- gumbel: argmax of log p plus the slot's frozen noise, so that an unchanged law repeats its token.

Every coupling leaves the draft's law, given all slots on its left, equal to the recorded q; that is
all the acceptance rule asks for, so the output's law is the plain loop's.

Departures: the recorded law of a kept draft is the new p (the released code keeps the stale one);
residuals are not filtered again; a new slot's random draft is recorded with its uniform law, not as
one-hot; tokens the layout knows are drafted as themselves; rows of a batch advance at their own
pace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmaccel.contracts import Prompt, TokenModel, check_window
from mmaccel.kernels import dispatch
from mmaccel.kernels.couple import couple
from mmaccel.results import Exactness, Generation, OnStep
from mmaccel.samplers.acceptance import (
    Coupling,
    check_coupling,
    count_leading,
    draw,
    is_kept,
    one_hot,
    residual,
)
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.proposers import check_source
from mmaccel.samplers.window.run import WindowRun

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], "tuple[Tensor, Tensor | None]"]
"""(p_target, p_draft `[B, K, V]`, drafts, coins `[B, K]`) -> kept `[B, K]` bool, total variation
`[B, K]` or None.
"""


@dataclass(frozen=True)
class SpeculativeJacobi:
    """SJD and MC-SJD: the plain loop's law, several tokens a pass.

    Args:
        window: tokens fed per pass.
        coupling: how slots behind the first rejection are redrawn.
        drafts: first content of new slots, one of `mmaccel.samplers.window.proposers.SOURCES`.

    Memory: two laws of `[B, window, V]` float32 are kept between passes.
    """

    window: int = 32
    coupling: Coupling = "maximal"
    drafts: str = "neighbour"

    exactness: ClassVar[Exactness] = "distribution"
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_window(self.window, adaptive=False)
        check_coupling(self.coupling)
        check_source(self.drafts)

    def sample(
        self,
        model: TokenModel,
        prompt: Prompt,
        length: int,
        *,
        params: SamplingParams,
        noise: Noise,
        on_step: OnStep | None = None,
    ) -> Generation:
        """Make up to `length` tokens a row; see `mmaccel.contracts.Policy.sample`."""
        run = WindowRun(
            self, model, prompt, length, params=params, noise=noise, on_step=on_step,
            window=self.window, drafts=self.drafts,
        )  # fmt: skip
        return iterate(run, self.coupling, exact_rule)


def exact_rule(
    p_target: Tensor, p_draft: Tensor, drafts: Tensor, coins: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Keep with probability min(1, p/q); spends nothing."""
    return is_kept(p_target, p_draft, drafts, coins), None


def iterate(run: WindowRun, coupling: str, rule: Rule) -> Generation:
    """The loop shared by the exact and the relaxed rule.

    Args:
        run: a fresh run.
        coupling: how drafts behind the first rejection are redrawn; always exact, whatever the
            rule.
        rule: decides which drafts are kept.

    Returns:
        The finished generation.
    """
    is_fused = (rule, coupling) == (exact_rule, "maximal")
    is_fused = is_fused and dispatch.takes("couple", run.made.device.type)

    def step_fn() -> None:
        noise = run.noise  # of coins, redraws and first drafts
        fresh = noise.fresh(run.slots, run.counters.passes)
        p_last, first = run.held("target law"), run.held("first")
        drafts, p_draft = _drafts(run, fresh.drafts[:, :-1], p_last, first)
        scores = run.forward()  # [B, W, V]
        coins = fresh.coins[:, :-1]
        if is_fused:
            judged = dispatch.run(couple, scores, p_draft, drafts, coins, fresh.redraws)
            p_target, tokens = judged.p_target, judged.verified
            n_kept = 1 + count_leading(judged.kept)
        else:
            p_target = scores.softmax(-1)
            kept, spent = rule(p_target[:, :-1], p_draft, drafts, coins)
            n_kept = 1 + count_leading(kept)  # [B]; the last is redrawn, or is the bonus slot
            rest = torch.cat([residual(p_target[:, :-1], p_draft), p_target[:, -1:]], 1)
            verified = _or_drafts(kept, drafts, draw(rest, fresh.redraws))  # [B, W]
            if coupling == "maximal":
                stays = is_kept(p_target[:, :-1], p_draft, drafts, coins)
                redrawn = verified
                if spent is not None:
                    redrawn = _or_drafts(stays, drafts, draw(rest, fresh.redraws))
            elif coupling == "gumbel":
                redrawn = (scores + noise.gumbel(run.slots, run.vocab_size)).argmax(-1)
            else:
                redrawn = draw(p_target, fresh.redraws)
            index = torch.arange(run.width, device=drafts.device)[None]
            tokens = torch.where(index < n_kept[:, None], verified, redrawn)
            if spent is not None:
                run.spend(spent)
        run.hold("target law", p_target)
        run.hold("first", run.slots[:, :1])
        run.accept(tokens, n_kept)

    while run.width:
        run.run_step(step_fn)
    return run.generation()


def _drafts(
    run: WindowRun, uniforms: Tensor, p_last: Tensor | None, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Drafts `[B, W-1]` of the window and the laws `[B, W-1, V]` they were drawn from, new ones by
    `uniforms` `[B, W-1]`.
    """
    slots = run.slots[:, :-1]
    guess, scores = run.propose()
    if guess is None:
        assert scores is not None
        law = scores.softmax(-1)  # [B, 1 or W-1, V]
        guess = draw(law, uniforms)
        p_draft = law.expand(-1, slots.shape[1], -1)
    else:
        p_draft = one_hot(guess, run.vocab_size)
    if (
        p_last is not None and first is not None
    ):  # standing drafts were drawn from the last pass's laws
        index = (slots - first).clamp(0, p_last.shape[1] - 1)
        rows = torch.arange(index.shape[0], device=index.device)[:, None]
        standing = p_last[rows, index]
        p_draft = torch.where(run.standing()[..., None], standing, p_draft)
    drafts = run.write_drafts(guess)
    forced = run.forced()
    if forced is not None:
        p_draft = torch.where((forced >= 0)[..., None], one_hot(drafts, run.vocab_size), p_draft)
    return drafts, p_draft


def _or_drafts(kept: Tensor, drafts: Tensor, tokens: Tensor) -> Tensor:
    """`drafts` `[B, W-1]` where kept, else `tokens` `[B, W]`; the bonus slot is always from
    `tokens`.
    """
    return torch.cat([torch.where(kept, drafts, tokens[:, :-1]), tokens[:, -1:]], 1)
