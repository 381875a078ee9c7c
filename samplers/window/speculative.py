"""Speculative decoding: all drafts of a pass are new, and the speculative rule accepts a prefix.

Y. Leviathan et al., ICML 2023 (arXiv 2211.17192), algorithm 1; C. Chen et al., 2023 (arXiv
2302.01318), algorithm 2. A small model drafts window - 1 tokens one by one
(`mmaccel.samplers.drafting.draft_model`), or a source does; tokens that it is certain of are
one-hot. The large model verifies all in one pass. Block verification: arXiv 2403.10444.

Departures: every row proceeds at its own pace; see also those of the draft sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import ClassVar, cast

import torch

from mmaccel.catalog import open_draft_model
from mmaccel.checks import show, within
from mmaccel.contracts import TokenModel
from mmaccel.errors import OptionError
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.drafting.contract import DraftSource
from mmaccel.samplers.drafting.sources import draft_by
from mmaccel.samplers.trees.contract import TreeShape
from mmaccel.samplers.trees.rule_walk import RuleStep
from mmaccel.samplers.trees.siblings.contract import SiblingRule
from mmaccel.samplers.trees.siblings.rsd import RSD
from mmaccel.samplers.trees.walk import find_walked
from mmaccel.samplers.window.block_verification import Verification
from mmaccel.samplers.window.fresh_drafts import draft_afresh, verify_chain
from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.window.run import WindowRun


@dataclass(frozen=True)
class Speculative(WindowPolicy):
    """Draft, verify, accept a prefix; the distribution of `Autoregressive`. A smaller model drafts,
    or a source such as prompt lookup, a head, or the model itself over part of its cache.

    Args:
        window: tokens that the target processes per pass; window - 1 of them are drafts.
        draft_model: a causal LM of transformers or a `TokenModel`, with the target's vocabulary; it
            reads only text. None: `drafts`.
        drafts: without a draft model, a source or its name: "ngram", prompt lookup, or "vegas", the
            model over part of its cache.
        tree: what a pass verifies beside the window's chain of drafts, such as
            `mmaccel.Comb(branches=4, length=3)`; None: nothing. It asks for a draft model, which
            draws a `Comb` or a `Sequoia`, or for drafts that have alternatives.
        siblings: how several random drafts of a slot are drawn, and which one is accepted.
        verification: "token", draft by draft, or "block", a chain together, which accepts more.

    Loses: prompt lookup on images, whose n-grams hardly recur (1.04 tokens a pass on `scenes`);
    draft models not several times cheaper (see `stats.draft_passes`). Steps are not captured.
    """

    window: int = 8
    draft_model: TokenModel | torch.nn.Module | None = field(default=None, repr=False)
    drafts: str | DraftSource = "ngram"
    tree: TreeShape | None = None
    siblings: SiblingRule = within(RSD(), hint="give one such as mmaccel.RSD()")
    verification: Verification = "token"

    exactness: ClassVar[Exactness] = "distribution"
    takes_corrections: ClassVar[bool] = False
    tree_ways: ClassVar[frozenset[str]] = frozenset({"grown", "drawn"})
    tree_remedy: ClassVar[str] = "a draft model, drafts='token-recycling'"

    def __post_init__(self) -> None:
        model = self.draft_model
        if isinstance(model, torch.nn.Module) and not isinstance(model, TokenModel):
            object.__setattr__(self, "draft_model", open_draft_model(model))
        elif model is not None and not isinstance(model, TokenModel):
            raise OptionError(
                f"draft_model: expected a causal LM of transformers or None, received "
                f"{show(model)}; load it with AutoModelForCausalLM.from_pretrained"
            )
        super().__post_init__()
        if self.verification == "block" and self.tree is not None:
            raise OptionError(
                f"verification: expected no tree for 'block', which verifies a chain, received "
                f"{self.tree!r}; choose 'token', or leave tree out"
            )

    def __repr__(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}
        if self.draft_model is not None:  # which drafts in place of a source
            values["drafts"] = self.draft_source()
        shown = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return f"{type(self).__qualname__}({shown})"

    def draft_source(self) -> DraftSource:
        if self.draft_model is None:
            return super().draft_source()
        return draft_by(cast(TokenModel, self.draft_model))

    def decode(self, run: WindowRun) -> Generation:
        step = self._open_step(run)
        while run.width:
            step()
            run.sync()
        return run.finish()

    def _open_step(self, run: WindowRun) -> Callable[[], None]:
        tree = find_walked(run)
        if tree is not None:
            return RuleStep(run, tree, self.siblings)

        def verify() -> None:
            drafts, p_draft = draft_afresh(run)
            fresh = run.noise.fresh(run.rows.slots, run.rows.passes)
            is_joint = self.verification == "block"
            verify_chain(run, drafts, p_draft, fresh, is_joint=is_joint)

        return verify
