"""Picture requests: any number of captions with seeds of their own, served as places become free.

The seed of a request alone decides its picture: neither the order of requests nor the number made
at a time enters. The next request takes the place of a finished one (see `mmaccel.places`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mmaccel.canvas_contracts import CanvasPolicy, OnCanvasStep
from mmaccel.contracts import Policy
from mmaccel.errors import OptionError
from mmaccel.pipelines.encoded_captions import encode_captions
from mmaccel.pipelines.one_run import alone
from mmaccel.pipelines.picture_decoding import PictureDecoding
from mmaccel.pipelines.picture_model import PictureModel, check_filters, pick_policy
from mmaccel.pipelines.picture_request import Request, Served, check_requests
from mmaccel.pipelines.pictures import check_at_least_one
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
            rows: most pictures in the making; the next request takes the place of one whose tokens
                are made.
            deliver: called with every finished picture, one at a time; an exception from it ends
                the run and reaches the caller.
            on_step: called after every pass with the state of the places.

        Returns:
            What all of it cost; `seconds` are without those of pixels and `deliver`. With a
            bitwise policy a picture has the pixels of `pipe(caption, seed=[seed])`, with the
            request's negative caption where it has one.

        Raises:
            OptionError: a request or an argument outside its domain, before anything is made.
            NumericsError: the model returned NaN; its `rows` are indices of requests.
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
        places = Places(rows, counter.hand_out)
        with alone(self.model):
            stats = self._decode(asked, run, filters, noise, on_step, places).stats
        stats.pixel_seconds = counter.pixel_seconds
        stats.seconds -= counter.seconds
        return stats


class _Counter:
    """Where finished pictures are rendered and handed out."""

    def __init__(
        self, pictures: PictureModel, requests: Sequence[Request], seeds: Sequence[int],
        deliver: Callable[[Served], None],
    ) -> None:  # fmt: skip
        self._pictures, self._requests, self._seeds = pictures, requests, seeds
        self._deliver = deliver
        self.pixel_seconds = self.seconds = 0.0

    def hand_out(self, row: EndedRow) -> None:
        """Render one picture by itself, so that others do not enter its pixels, and deliver it."""
        began, request, seed = time.perf_counter(), self._requests[row.row], self._seeds[row.row]
        image = self._pictures.render(row.tokens[None], [request.caption], [seed])[0]
        self.pixel_seconds += time.perf_counter() - began
        spent = row.total_variation, row.nats
        self._deliver(Served(request, image, row.tokens.cpu(), row.passes, *spent))
        self.seconds += time.perf_counter() - began
