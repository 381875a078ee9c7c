"""The oracle: how many tokens a pass any rule could commit that keeps stepwise decoding's tokens.

At every pass it commits all open slots whose drawn token is the one that stepwise decoding put
there, which it is told. From the same canvas no rule that keeps these tokens commits more in that
pass. The tokens a pass that it reaches stand for the headroom of the model: a policy's share of
them is how much of it the policy takes. (Slots that wait may be right later, so that it is the best
rule of one pass, and not proven to be the best of all.)

Source of the idea: Nemotron-Labs-Diffusion's authors compare confidence thresholds with such an
oracle (2026).

Departures: the reference is `Stepwise` with the same noise, at any temperature. A pass without a
right token commits one all the same, the most confident slot's, as the oracle knows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from mmaccel.results import Exactness, Generation
from mmaccel.samplers.canvas.cache_plan import CachePlan
from mmaccel.samplers.canvas.policy import RunPolicy
from mmaccel.samplers.canvas.run import CanvasRun


@dataclass(frozen=True, eq=False)
class Oracle(RunPolicy):
    """Commits what is right; for measurements, as it needs the result.

    Args:
        wanted: `[B, L]` int64, the tokens of `Stepwise` with the same noise.
        block, cache: as in `Stepwise`.
    """

    wanted: Tensor
    block: int | None = None
    cache: CachePlan | str = "none"

    exactness: ClassVar[Exactness] = "bitwise"

    def __repr__(self) -> str:
        return f"Oracle(block={self.block}, cache={self.cache!r})"

    def decode(self, run: CanvasRun) -> Generation:
        """Fill the canvas of a run of this policy."""
        wanted = self.wanted.to(run.canvas.tokens.device)
        with run.interruptible():
            while run.sync():
                predictions = run.forward()
                tokens = wanted.gather(1, predictions.slots)
                is_right = predictions.is_open & (predictions.drawn == tokens)
                chosen = predictions.at_least_one(is_right)
                run.commit(replace(predictions, drawn=tokens), chosen)
        return run.generation()
