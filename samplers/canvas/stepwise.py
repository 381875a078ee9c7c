"""Stepwise decoding of a canvas: one slot a pass, chosen before its token is drawn. The reference.

S. Nie et al., "Large Language Diffusion Models", 2025, arXiv 2502.09992, algorithm 5 with as many
steps as slots; orders: V. Besnier et al., arXiv 2503.17076; J. Kim et al., arXiv 2502.06768
(margin).

Departures: the slot is chosen from the logits, or from none, and the token is drawn after that. The
released samplers draw a token for every slot and keep the most probable draw, which decodes another
distribution than the model's, with a perfect model too: order "sampled".
"""

from __future__ import annotations

from dataclasses import dataclass

from mmaccel.checks import one_of, within
from mmaccel.results import Exactness, Generation
from mmaccel.samplers.canvas.cache_plan import CachePlan, as_plan
from mmaccel.samplers.canvas.orders import ORDERS
from mmaccel.samplers.canvas.policy import RunPolicy
from mmaccel.samplers.canvas.run import CanvasRun


@dataclass(frozen=True)
class Stepwise(RunPolicy):
    """One slot a pass, chosen before its token is drawn: the reference of canvas decoding.

    Args:
        order: which slot is next: "confidence", "entropy", "margin", "position", "left", "random",
            "halton" or "sampled"; "auto" is "halton" on the grid of an image, else "confidence".
        block: slots per block; None takes the canvas as one, or a block-causal model's own.
        cache: what passes reuse, a `CachePlan` or its kind.

    Loses: always: as many passes as slots. Order "sampled" and a cache that grows stale make it
    relaxed.
    Figures: distance from the true distribution 0 in every order but "sampled", 0.24 there (six
    enumerated distributions).
    """

    order: str = one_of("auto", ORDERS)
    block: int | None = within(None, 1, hint="None takes the whole canvas, or the model's own")
    cache: CachePlan | str = "none"

    @property
    def exactness(self) -> Exactness:
        """Bitwise reproducible, and the model's distribution, unless the order depends on what was
        drawn or the cache is stale.
        """
        is_exact = self.order != "sampled" and as_plan(self.cache).is_exact
        return "bitwise" if is_exact else "relaxed"

    def decode(self, run: CanvasRun) -> Generation:
        order = run.order(self.order)
        with run.interruptible():
            while run.sync():
                predictions = run.forward()
                run.commit(predictions, order.first(predictions))
        return run.generation()
