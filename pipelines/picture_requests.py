"""Picture requests: any number of captions with seeds of their own, served as places become free.

The seed of a request alone decides its picture: neither the order of requests nor the number made
at a time enters. Models in windows take the next request into the place of a finished one (see
`mmaccel.places`); those that fill a canvas are served by batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mmaccel.canvas_contracts import (
    CanvasPolicy,
    CanvasProgress,
    OnCanvasStep,
    kind_of,
)
from mmaccel.contracts import Policy
from mmaccel.errors import OptionError
from mmaccel.pipelines.encoded_captions import Encoded, encode_captions
from mmaccel.pipelines.one_run import alone
from mmaccel.pipelines.picture_decoding import PictureDecoding
from mmaccel.pipelines.picture_model import PictureModel, check_filters, pick_policy
from mmaccel.pipelines.picture_request import Request, Served, check_requests
from mmaccel.pipelines.pictures import add_stats, check_at_least_one
from mmaccel.places import EndedRow, Places
from mmaccel.results import OnStep, Stats
from mmaccel.samplers.filters import Filters
from mmaccel.samplers.noise import Noise


class RequestService(PictureDecoding):
    """What `TextToImage` does for requests."""

    def serve(
        self,
        requests: Sequence[Request],
        filters: Filters,
        *,
        policy: Policy | CanvasPolicy | None = None,
        rows: int = 8,
        deliver: Callable[[Served], None],
        on_step: OnStep | OnCanvasStep | None = None,
    ) -> Stats:
        """Make a picture for every request, and hand each out as soon as it is finished.

        Args:
            requests: at least one.
            filters: guidance, temperature and truncation of all.
            policy: as in `TextToImage.__call__`.
            rows: most pictures in the making. In a window, the next request takes the place of one
                whose tokens are made; a canvas is filled by batches of so many.
            deliver: called with every finished picture, one at a time; an exception from it ends
                the run and reaches the caller.
            on_step: called after every pass with the state of the places.

        Returns:
            What all of it cost; `seconds` are without those of pixels and `deliver`. With a
            bitwise policy a picture has the pixels of `pipe(caption, seed=[seed])`, with the
            request's negative caption where it has one.

        Raises:
            OptionError: a request or an argument outside its domain, before anything is made.
            NumericsError: the model returned NaN; its `rows` are indices of requests, for models
                in windows.
            BusyError: another run of this model has not ended.
        """
        requests = check_requests(requests)
        check_at_least_one("rows", rows)
        check_filters(filters)
        captions, negatives = zip(*[(request.caption, request.negative) for request in requests])
        asked = encode_captions(self.pictures, captions, negatives, filters)
        seeds = [request.seed for request in requests]
        noise = Noise.from_seed(seeds, len(requests), self.model.device)
        run = pick_policy(policy, self.model)
        if not callable(deliver):
            raise OptionError(f"deliver: expected a function, received {deliver!r}; give one")
        counter = _Counter(self.pictures, requests, noise.seeds.tolist(), deliver)
        decode = self._fill if kind_of(self.model) == "canvas" else self._refill
        with alone(self.model):
            stats = decode(asked, run, filters, noise, on_step, rows, counter)
        stats.pixel_seconds = counter.pixel_seconds
        return stats

    def _refill(
        self, asked: Encoded, run: Any, filters: Any, noise: Noise, on_step: Any, rows: int,
        counter: _Counter,
    ) -> Stats:  # fmt: skip
        """Serve from a window."""

        def hand_out(row: EndedRow) -> None:
            counter.hand_out(row.row, row.tokens, row.passes, row.total_variation)

        made = self._decode(asked, run, filters, noise, on_step, Places(rows, hand_out))
        made.stats.seconds -= counter.seconds
        return made.stats

    def _fill(
        self, asked: Encoded, run: Any, filters: Any, noise: Noise, on_step: Any, rows: int,
        counter: _Counter,
    ) -> Stats:  # fmt: skip
        """Serve from a canvas, batch by batch."""
        spent: list[list[float]] = []

        def look(progress: CanvasProgress) -> Tensor | None:
            spent.append(progress.nats.tolist())
            return None if on_step is None else on_step(progress)

        parts = []
        for first in range(0, len(asked), rows):
            part = slice(first, first + rows)
            own = Noise(noise.seeds[part], noise.items[part])
            made = self._decode(asked[part], run, filters, own, look)
            tokens, passes = made.tokens.split(1), made.passes.tolist()
            for k, nats in enumerate(spent[-1]):
                counter.hand_out(first + k, tokens[k][0], passes[k], 0.0, nats)
            parts.append(made.stats)
        return add_stats(parts)


class _Counter:
    """Where finished pictures are rendered and handed out."""

    def __init__(
        self, pictures: PictureModel, requests: Sequence[Request], seeds: Sequence[int],
        deliver: Callable[[Served], None],
    ) -> None:  # fmt: skip
        self._pictures, self._requests, self._seeds = pictures, requests, seeds
        self._deliver = deliver
        self.pixel_seconds = self.seconds = 0.0

    def hand_out(
        self, row: int, tokens: Tensor, passes: int, variation: float, nats: float = 0.0
    ) -> None:
        """Render one picture by itself, so that others do not enter its pixels, and deliver it."""
        began, request = time.perf_counter(), self._requests[row]
        image = self._pictures.render(tokens[None], [request.caption], [self._seeds[row]])[0]
        self.pixel_seconds += time.perf_counter() - began
        self._deliver(Served(request, image, tokens.cpu(), passes, variation, nats))
        self.seconds += time.perf_counter() - began
