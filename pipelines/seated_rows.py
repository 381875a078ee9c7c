"""What a model in windows does so that its rows can be fed, chosen and left out by themselves.

See `mmaccel.samplers.newcomers.Reseatable`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from mmaccel.pipelines.static_buffers import StaticModelBuffers
from mmaccel.pipelines.window_cache import Placement


class SeatedRows(StaticModelBuffers):
    """A window over a `Placement`, whose `row_inputs` have one entry for each row."""

    feed: Any
    _placement: Placement | None

    def offered(self) -> dict[str, Tensor | None]:
        """See `Reseatable.offered`: what stands in `row_inputs`."""
        return {name: getattr(self, name) for name in self.row_inputs}

    def seat(self, offered: dict[str, Tensor | None], rows: Tensor | None) -> None:
        """See `Reseatable.seat`. A captured pass finds its tensors where they were."""
        for name, value in offered.items():
            if value is None or rows is None:
                setattr(self, name, value)
                continue
            chosen, place = value[rows.to(value.device)], getattr(self, name)
            if place is value or place is None or len(place) != len(chosen):
                setattr(self, name, chosen)
            else:
                place.copy_(self.fit(chosen, place))

    def feed_rows(self, tokens: Tensor, start: Tensor, rows: Tensor) -> None:
        """See `Reseatable.feed_rows`. Cost: a pass over these rows alone."""
        assert self._placement is not None, "reserve comes first"
        with self._only(rows), self._placement.only(rows):
            self.feed(tokens, start)

    def keep_rows(self, rows: Tensor) -> None:
        """See `Reseatable.keep_rows`. Cost: every layer's keys and values are copied once."""
        place = self._placement
        assert place is not None, "reserve comes first"
        for layer in getattr(self._cache, "layers", self._cache):
            layer.keep(rows)
        place.rows = place.stored = len(rows)

    @contextmanager
    def _only(self, rows: Tensor) -> Iterator[None]:
        own = self.offered()
        try:
            for name, value in own.items():
                setattr(self, name, None if value is None else value[rows])
            yield
        finally:
            for name, value in own.items():
                setattr(self, name, value)
