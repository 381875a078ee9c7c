"""A decoding loop that a model has of its own, read as a task for a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmaccel.contracts import Policy, Prompt, TokenModel
from mmaccel.pipelines.engine import Engine
from mmaccel.results import Generation, Stats
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise


@dataclass
class OwnLoop:
    """One call of such a loop.

    Attributes:
        reasons: why the model's own loop has to run; if there are any, the rest is not looked at.
        window: the model in windows.
        prompt: what stands before the first token.
        length: tokens to make.
        filters: from logits to the law.
        samples: whether tokens are drawn; otherwise a seed has no say.
        hand_over: makes of the tokens what the call returns.
    """

    reasons: list[str] = field(default_factory=list)
    window: TokenModel | None = None
    prompt: Prompt | None = None
    length: int = 0
    filters: Filters = field(default_factory=Filters)
    samples: bool = True
    hand_over: Callable[[Generation], Any] = lambda made: made.tokens

    def decode(
        self, policy: Policy, seed: int | Sequence[int], engine: Engine
    ) -> tuple[Any, Stats]:
        """Run a policy; what the call returns, and what it cost."""
        assert self.window is not None and self.prompt is not None
        engine.prepare(self.window, self.prompt, policy, self.filters)
        noise = Noise.from_seed(seed, self.prompt.batch, self.prompt.tokens.device)
        made = policy.sample(
            self.window, self.prompt, self.length, filters=self.filters, noise=noise
        )
        return self.hand_over(made), made.stats
