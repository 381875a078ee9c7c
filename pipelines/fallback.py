"""What becomes of a call that no policy serves: it is refused, or run by the original and noted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mmaccel.contracts import Layout, Policy
from mmaccel.errors import AttachError
from mmaccel.pipelines.layout_mask import with_layout
from mmaccel.pipelines.original_run import find_caller, run_original
from mmaccel.results import Stats


@dataclass
class Fallback:
    """Runs the original methods of a model, or refuses to.

    A layout goes with the call, as logits processors. Loops that take none are refused, since
    what they make would not be what was asked for.

    Args:
        policy: what the call should have been decoded by.
        seed: of the original's draws, see `run_original`.
        strict: refuse always.
        layout: what is known about the slots, or None.
        history: statistics, to which each run's are added.
        warned: reasons that were told before.
    """

    policy: Policy
    seed: int | Sequence[int] | None
    strict: bool
    layout: Layout | None
    history: list[Stats]
    warned: set[str]

    def run(self, model: Any, name: str, reasons: list[str], *args: Any, **options: Any) -> Any:
        """Run a decoding loop of transformers' own, warn once and note why.

        Args:
            model: the model.
            name: of the loop.
            reasons: why no policy runs.
            *args: of the loop: ids `[B, T]`, processors, criteria and configuration, in this order
                where they are not given by name.
            **options: of the loop.

        Raises:
            AttachError: with `strict`, or a loop that cannot be held to the layout.
        """
        text = "; ".join(reasons)
        if self.strict:
            self.refuse(text)
        if self.layout is not None:
            names = ("input_ids", "logits_processor", "stopping_criteria", "generation_config")
            options, args = dict(zip(names, args)) | options, args[len(names) :]
            given = options["logits_processor"]
            if type(given).__name__ != "LogitsProcessorList":
                self.refuse_layout(f"a {type(given).__name__} in place of a LogitsProcessorList")
            if getattr(options["generation_config"], "is_assistant", False):
                self.refuse_layout("a model that drafts for another one")
            n_prompt = options["input_ids"].shape[1]
            options["logits_processor"] = with_layout(given, self.layout, n_prompt)
            args = (*(options.pop(name) for name in names), *args)
        self.warn(text)
        out, stats = run_original(model, name, args, options, self.seed)
        stats.policy, stats.fallbacks = repr(self.policy), list(reasons)
        self.history.append(stats)
        return out

    def refuse(self, reason: str) -> NoReturn:
        """Raise `AttachError`."""
        raise AttachError(
            f"generate: expected a call that {type(self.policy).__name__} can serve, received "
            f"{reason}; leave that out, or attach with strict=False to run it without the policy"
        )

    def refuse_layout(self, reason: str) -> NoReturn:
        """Raise `AttachError`: the original would run without the layout."""
        raise AttachError(
            f"generate: expected a call that can be held to a layout, received {reason}; leave "
            "that out, or attach without layout"
        )

    def warn(self, reason: str) -> None:
        """Tell the user's own line, once for each reason."""
        if reason not in self.warned:
            self.warned.add(reason)
            warnings.warn(f"mmaccel: ran without the policy: {reason}", stacklevel=find_caller())
