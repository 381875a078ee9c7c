"""The requests of a run with continuous batching, by the numbers of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from mmaccel.contracts import Arrivals, FinishedRow
from mmaccel.pipelines.text_to_image.model import Encoded, ImageModel, encode_prompts, make_rows
from mmaccel.pipelines.text_to_image.outputs import Request, RequestOutput, check_requests
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams


class RunningRequests:
    """Requests that have not finished; others may join.

    Args:
        image_model: the model.
        requests: that begin the run.
        params: of all.
    """

    def __init__(
        self, image_model: ImageModel, requests: Sequence[Request], params: SamplingParams
    ) -> None:
        self._image_model = image_model
        self._params = params
        self._running = dict(enumerate(requests))
        self._numbers = count(len(requests))

    def encode(self, requests: Sequence[Request]) -> Encoded:
        """Their prompts.

        Raises:
            OptionError: see `encode_prompts`.
        """
        texts = [request.prompt for request in requests]
        negatives = [request.negative for request in requests]
        return encode_prompts(self._image_model, texts, negatives, self._params)

    def make_noise(self, requests: Sequence[Request]) -> Noise:
        """Noise of rows with seeds of their own."""
        seeds = [request.seed for request in requests]
        return Noise.from_seed(seeds, len(requests), self._image_model.window.device)

    def finish(self, row: FinishedRow) -> RequestOutput | None:
        """Render one image by itself, so that no other image affects its pixels."""
        request = self._running.pop(row.row)
        tokens = row.tokens
        if len(tokens) < self._image_model.layout.frame:
            return None
        seed = Noise.from_seed([request.seed], 1).seeds.tolist()
        image = self._image_model.render(tokens[None], [request.prompt], seed)
        return RequestOutput(
            request, image[0], tokens.cpu(), row.passes, row.total_variation, row.nats
        )

    def receive(self, arrivals: Callable[[int], Sequence[Request]], most: int) -> Arrivals | None:
        """The rows of at most `most` requests that join now."""
        asked = arrivals(most)
        if not asked:
            return None
        asked = check_requests(asked)
        self._running.update((next(self._numbers), request) for request in asked)
        prompt = make_rows(self._image_model, self.encode(asked), self._params)
        return Arrivals(prompt, self.make_noise(asked))
