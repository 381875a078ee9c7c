"""What was found out about a pipeline's model, once for each kind of call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.block_trial import Line, Verdict, try_call, try_mask
from mmaccel.pipelines.place_store import StoredCalls


class Trials:
    """Verdicts on one model.

    Args:
        model: for its name.
        call: runs it.
        policy: name of what wants to know.
        strict: raise where nothing can be kept.
    """

    def __init__(self, model: Any, call: Callable[..., Any], policy: str, strict: bool) -> None:
        self._name, self._call = type(model).__name__, call
        self._policy, self._strict = policy, strict
        self._known: dict[Any, Verdict] = {}

    def of_call(self, line: Line, store: StoredCalls) -> Verdict:
        """On the call that the pipeline makes, with its 2-D mask; see `try_call`.

        A mask that hides nothing and one that does are tried apart: models take other roads.

        Raises:
            UnsupportedModelError: a model that takes no 2-D mask; with `strict`, also one of which
                nothing can be kept.
        """
        key = ("call", line.is_ragged, line.block, store.dtype)
        if key not in self._known:
            self._known[key] = try_call(line, self._ask, store)
        return self.settle(self._known[key])

    def of_mask(self, line: Line, store: StoredCalls) -> Verdict:
        """On 4-D block masks; see `try_mask`.

        Raises:
            UnsupportedModelError: with `strict`, a model that does not follow them.
        """
        key = ("mask", line.block, store.dtype)
        if key not in self._known:
            self._known[key] = try_mask(line, store)
        return self.settle(self._known[key])

    def settle(self, verdict: Verdict) -> Verdict:
        """A verdict, or an error where there is no way around it.

        Raises:
            UnsupportedModelError: with `strict`, where there is a reason against it.
        """
        if verdict.reason and self._strict:
            raise UnsupportedModelError(
                f"pipeline: expected a call that {self._policy} can serve, received one where "
                f"{verdict.reason}; attach with strict=False to run it without"
            )
        return verdict

    def _ask(self, line: Line) -> Tensor:
        try:
            out = self._call(line.ids, attention_mask=line.visible, position_ids=line.positions)
        except (TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"model: expected one that takes the pipeline's 2-D mask, received a {self._name} "
                f"that does not ({' '.join(str(error).split())[:80]}); attach "
                "CachedBlocks(mask='blocks')"
            ) from error
        logits: Tensor = out.logits
        return logits
