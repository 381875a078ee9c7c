"""Pipelines whose models read prompts and draw: `serve`, with continuous batching."""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from mmaccel.contracts import Arrivals, FinishedRow
from mmaccel.options import takes
from mmaccel.pipelines.call_options import ServeOptions
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
from mmaccel.pipelines.media import RowPlan, RunningRequests
from mmaccel.pipelines.pipeline import Pipeline
from mmaccel.pipelines.text_to_image.model import (
    PromptedModel,
    encode_prompts,
    make_rows,
)
from mmaccel.pipelines.text_to_image.outputs import Request, check_requests
from mmaccel.results import Stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.run_lock import alone
from mmaccel.samplers.sampling_params import SamplingParams

_WARM_UP_PASSES = 3


@dataclass(frozen=True, kw_only=True)
class PromptServe(ServeOptions):
    """The arguments of `PromptPipeline.serve`, which explains them."""

    params: SamplingParams = field(kw_only=False)


class PromptPipeline(Pipeline):
    """Base of the pipelines whose model is a `PromptedModel`."""

    @property
    def prompted_model(self) -> PromptedModel:
        model: PromptedModel = self.host
        return model

    @property
    def length(self) -> int:
        return self.prompted_model.length

    @property
    def size(self) -> tuple[int, int]:
        return self.prompted_model.size

    def resize(self, size: tuple[int, int]) -> Self:
        """This pipeline for another size in pixels, if the model has it. Weights are shared; both
        together still have one run at a time.
        """
        model = self.prompted_model.resize(LoadConfig(size=size).size or self.size)
        return self._share(model)

    def _share(self, model: PromptedModel) -> Self:
        """A pipeline for a model that has the weights of this one's."""
        resized = type(self)(model, self.source, replace(self.engine))
        resized._offloaded = self._offloaded
        return resized

    @abstractmethod
    def finish(self, request: Request, row: FinishedRow) -> Any:
        """Render one whole row by itself, so that no other row affects its pixels."""

    @takes(PromptServe)
    def serve(self, call: PromptServe) -> Stats:
        """Make an image or a clip for every request, with continuous batching.

        Args:
            params: guidance, temperature and truncation of all.
            policy, kv_cache, attention: as in `__call__`. Under methods of layers all requests
                begin together: at most `rows`, and none that join.
            rows: rows decoded at a time at most; the next request starts when one has finished.
            deliver: called with every output as soon as it is finished, one at a time. An exception
                from it ends the run and reaches the caller. A row that `on_step` ends early is not
                delivered.
            on_step: called after every pass with the state of the running rows.
            arrivals: called between two passes, once all `requests` have begun, with the number of
                requests that may join (at least 1); returns that many or fewer, or none. The run
                ends when all have finished and there are no more. They are numbered, as in the
                `rows` of `on_step`, behind those before.
            prompt_width: tokens of the longest prompt that may join (`Encoded.width`), as far as
                the model has positions.
            prefix_tree: a `mmaccel.PrefixTree`: requests whose prompts begin with what it holds
                process what follows, and leave their prompts in it, for all that are given it.

        Returns:
            Stats of all requests; `seconds` excludes the time spent in pixels and in `deliver`.
            With a bitwise policy an output has the pixels of `pipe(prompt, seed=[seed])`, with the
            request's negative prompt where it has one.

        Raises:
            NumericsError: the model returned NaN; its `rows` are indices of requests.
        """
        requests = check_requests(call.requests)
        params = call.params
        decoding = self.choose(call)

        def begin(joined: dict[int, Request]) -> Arrivals:
            asked = list(joined.values())
            texts = [request.prompt for request in asked]
            negatives = [request.negative for request in asked]
            encoded = encode_prompts(self.prompted_model, texts, negatives, params)
            noise = Noise.from_seed(
                [request.seed for request in asked], len(asked), self.model.device
            )
            return Arrivals(make_rows(self.prompted_model, encoded, params), noise)

        def finish(row: FinishedRow) -> Any:
            request = running.end(row)
            return self.finish(request, row) if len(row.tokens) == self.length else None

        running = RunningRequests(begin)
        with alone(self.model), self._at_work():
            with torch.no_grad():
                prompt, noise = running.admit(requests)
            plan = RowPlan(
                prompt=self.make_room(prompt, call, self.length),
                length=self.length,
                max_num_seqs=call.rows,
                params=params,
                noise=noise,
                arrivals=running.joining(call.arrivals, check_requests),
                prefix_tree=call.prefix_tree,
            )
            return self.decode_rows(
                decoding, plan, finish=finish, deliver=call.deliver, on_step=call.on_step
            )

    def warm_up(
        self, policy: Any, params: SamplingParams, text: str, rows: int, on_pass: Any = None
    ) -> float:
        """Seconds of a pass, by a few, which allocate; an exception from `on_pass`, called after
        every pass, ends the warming up.
        """
        ends: list[float] = []

        def stop(progress: Any) -> Any:
            ends.append(time.perf_counter())
            if on_pass is not None:
                on_pass()
            is_last = progress.passes >= _WARM_UP_PASSES
            return torch.zeros_like(progress.lengths) if is_last else None

        noise = Noise.from_seed(0, rows, self.model.device)
        encoded = [self.prompted_model.encode(text)] * rows
        with alone(self.model), torch.no_grad():
            prompt = self.prompted_model.prompt(encoded, params.guidance_scale != 1)
            self.engine.prepare(self.model, prompt, policy, params)
            policy.sample(self.model, prompt, self.length, params=params, noise=noise, on_step=stop)
        return (ends[-1] - ends[0]) / max(1, len(ends) - 1)

    def _render_row(self, request: Request, row: FinishedRow) -> Any:
        seed = Noise.from_seed([request.seed], 1).seeds.tolist()
        (rendered,) = self.prompted_model.render(row.tokens[None], [request.prompt], seed)
        return rendered
