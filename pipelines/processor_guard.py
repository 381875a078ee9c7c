"""The processors of a run: a policy asks copies of the user's own, and notices if they remember.

A trial beforehand asks two or three questions; a parser that changes its state at one token in ten
passes it. So the originals are left alone, and a run in whose course a copy changes is given up:
transformers' own loop can begin where nothing has been asked.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from mmaccel.errors import AttachError
from mmaccel.pipelines.object_trial import ObjectTrial
from mmaccel.pipelines.processor_kinds import is_own, is_users
from mmaccel.pipelines.token_feed import TokenFeed
from mmaccel.pipelines.trial import Trial
from mmaccel.pipelines.tried import Tried


class Remembers(Exception):
    """A run that cannot go on; the text says whose fault it is."""


class ProcessorGuard:
    """Copies of the processors of one run.

    Args:
        processors: each with its kind, as `find_kind` has found it; none is refused.

    Attributes:
        processors: the same with copies in the place of the user's own.
    """

    def __init__(self, processors: Sequence[tuple[Any, str]]) -> None:
        self._trials: list[tuple[str, Tried]] = []
        self.processors = [(self._copied(one), kind) for one, kind in processors]

    def check(self, feed: TokenFeed | None = None) -> None:
        """Look at all copies.

        Args:
            feed: of a run whose tokens a streamer or a criterion sees while they are made.

        Raises:
            Remembers: one has changed; what it wrote to is as it was before the run.
            AttachError: the same, but nobody can begin anew.
        """
        for name, trial in self._trials:
            if trial.has_changed:
                for _, one in self._trials:
                    one.restore()
                reason = f"{name}, which remembers earlier calls, as the run has shown"
                if feed is None or not feed.steps:
                    raise Remembers(reason)
                raise AttachError(
                    f"generate: expected processors that a policy can ask ahead, received {reason} "
                    f"when {feed.steps} tokens had been streamed; make this call without the policy"
                )

    def _copied(self, processor: Any) -> Any:
        if is_own(processor, "PrefixConstrainedLogitsProcessor"):
            allowed = processor._prefix_allowed_tokens_fn
            own = getattr(allowed, "__name__", type(allowed).__name__)
            copy = self._kept(f"a prefix_allowed_tokens_fn ({own})", Trial(allowed))
            return type(processor)(copy, processor._num_beams)
        if not is_users(processor):
            return processor
        if isinstance(processor, types.FunctionType):
            return self._kept(f"a function ({processor.__name__})", Trial(processor))
        return self._kept(f"a {type(processor).__name__}", ObjectTrial(processor))

    def _kept(self, name: str, trial: Tried) -> Any:
        self._trials.append((name, trial))
        return trial.copy
