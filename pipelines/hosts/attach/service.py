"""What an attached policy does in the calls of one object, and how it says that it did not."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmaccel.results import Stats

Methods = Mapping[str, Callable[..., Any]]


@dataclass(eq=False, kw_only=True)
class Service:
    """Base of these, which have a `policy`."""

    history: list[Stats] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)  # reasons that the caller was warned of

    @property
    def stats(self) -> Stats | None:
        return self.history[-1] if self.history else None

    def methods(self) -> list[tuple[Any, Methods]]:
        """Objects, each with the methods that replace its own; these take the object first."""
        raise NotImplementedError

    def kept_tokens(self) -> list[Any]:
        return []

    def reset(self) -> None:
        """Drop what was made for the model as it was."""

    def close(self, *, keep_packed: bool = False) -> None:
        """Drop what was made for the model, before the policy is detached."""

    def record(self, stats: Stats) -> None:
        self.history.append(stats)
        self.warn(stats.fallbacks)

    def warn(self, reasons: Sequence[str]) -> None:
        """Warn of reasons for running without the policy, once; it points at the user's line."""
        reason = "; ".join(reasons)
        if not reason or reason in self.warned:
            return
        self.warned.add(reason)
        level = 1
        frame = sys._getframe()
        while frame.f_back is not None:
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if package not in ("mmaccel", "transformers", "torch"):
                break
            level = level + 1
            frame = frame.f_back
        warnings.warn(f"mmaccel: ran without the policy: {reason}", stacklevel=level)
