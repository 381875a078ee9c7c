"""The requests of a run with continuous batching, by the numbers of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from mmaccel.contracts import Arrivals, FinishedRow
from mmaccel.pipelines.text_to_image.model import (
    Encoded,
    PromptedModel,
    encode_prompts,
    make_rows,
)
from mmaccel.pipelines.text_to_image.outputs import Request, check_requests
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams


class RunningRequests:
    """Requests that have not finished; others may join.

    Args:
        model: the model.
        requests: that begin the run.
        params: of all.
        finish: makes the output of a whole row.
    """

    def __init__(
        self,
        model: PromptedModel,
        requests: Sequence[Request],
        params: SamplingParams,
        finish: Callable[[Request, FinishedRow], Any],
    ) -> None:
        self._model = model
        self._params = params
        self._finish = finish
        self._running = dict(enumerate(requests))
        self._numbers = count(len(requests))

    def encode(self, requests: Sequence[Request]) -> Encoded:
        """Their prompts.

        Raises:
            OptionError: see `encode_prompts`.
        """
        texts = [request.prompt for request in requests]
        negatives = [request.negative for request in requests]
        return encode_prompts(self._model, texts, negatives, self._params)

    def make_noise(self, requests: Sequence[Request]) -> Noise:
        """Noise of rows with seeds of their own."""
        seeds = [request.seed for request in requests]
        return Noise.from_seed(seeds, len(requests), self._model.window.device)

    def finish(self, row: FinishedRow) -> Any:
        """The output of a row; None of one that ended early."""
        request = self._running.pop(row.row)
        return self._finish(request, row) if len(row.tokens) == self._model.length else None

    def receive(self, arrivals: Callable[[int], Sequence[Request]], most: int) -> Arrivals | None:
        """The rows of at most `most` requests that join now."""
        asked = arrivals(most)
        if not asked:
            return None
        asked = check_requests(asked)
        self._running.update((next(self._numbers), request) for request in asked)
        prompt = make_rows(self._model, self.encode(asked), self._params)
        return Arrivals(prompt, self.make_noise(asked))
