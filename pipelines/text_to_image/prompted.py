"""Pipelines whose models read prompts and draw: `serve`, with continuous batching."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch.nn import functional as F

from mmaccel.contracts import FinishedRow
from mmaccel.options import takes
from mmaccel.pipelines.call_options import ServeOptions
from mmaccel.pipelines.loading.checkpoint import LoadConfig
from mmaccel.pipelines.media import RowPlan
from mmaccel.pipelines.pipeline import Pipeline
from mmaccel.pipelines.text_to_image.model import (
    Encoded,
    PromptedModel,
    check_params,
    make_rows,
)
from mmaccel.pipelines.text_to_image.outputs import Request, check_requests
from mmaccel.pipelines.text_to_image.requests import RunningRequests
from mmaccel.results import Stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.run_lock import alone
from mmaccel.samplers.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class PromptServe(ServeOptions):
    """The arguments of `PromptPipeline.serve`, which explains them."""

    params: SamplingParams = field(kw_only=False)
    encoded: Encoded | None = None


class PromptPipeline(Pipeline):
    """Base of the pipelines whose model is a `PromptedModel`."""

    @property
    def prompted_model(self) -> PromptedModel:
        """The model with its layout, prompts and renderer."""
        model: PromptedModel = self.host
        return model

    @property
    def length(self) -> int:
        """Number of tokens in an image or a clip."""
        return self.prompted_model.length

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of an image or a frame in pixels."""
        return self.prompted_model.size

    def resize(self, size: tuple[int, int]) -> Self:
        """This pipeline for another size. Weights are shared; nothing is loaded.

        Both pipelines together still have one run at a time.

        Args:
            size: width and height in pixels.

        Raises:
            OptionError: a size that the model does not have; most models have one.
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
            requests: at least one.
            params: guidance, temperature and truncation of all.
            policy, kv_cache, attention: as in `__call__`. Under methods of layers all
                requests begin together: at most `rows`, and none that join.
            rows: rows decoded at a time at most; the next request starts when one has finished.
            deliver: called with every output as soon as it is finished, one at a time. An exception
                from it ends the run and reaches the caller. A row that `on_step` ends early is not
                rendered and not delivered.
            on_step: called after every pass with the state of the running rows.
            arrivals: called between two passes, once all `requests` have begun, with the number of
                requests that may join (at least 1); returns that many or fewer, or none. The run
                ends when all have finished and there are no more. Their numbers, as in the `rows`
                of `on_step`, follow those of the requests before.
            prompt_width: tokens of the longest prompt that may join; see `Encoded.width`. No more
                are reserved than the model has positions for.
            prefix_tree: a `mmaccel.PrefixTree`: requests whose prompts begin with what it holds
                process what follows, and leave their prompts in it, for this `serve` and those
                that are given the same tree. None: every request processes its whole prompt.
            encoded: the prompts of `requests`, from `encode_prompts` for this model and `params`;
                None encodes them.

        Returns:
            Stats of all requests; `seconds` excludes the time spent in pixels and in `deliver`.
            With a bitwise policy an output has the pixels of `pipe(prompt, seed=[seed])`, with the
            request's negative prompt where it has one.

        Raises:
            OptionError: a request or an argument outside its domain, before any pass; or a request
                that joins.
            NumericsError: the model returned NaN; its `rows` are indices of requests.
            BusyError: another run of this model has not ended.
        """
        requests = check_requests(call.requests)
        params = call.params
        check_params(params)
        call.check()
        running = RunningRequests(self.prompted_model, requests, params, self.finish)
        encoded = running.encode(requests) if call.encoded is None else call.encoded
        noise = running.make_noise(requests)
        decoding = self.choose(call)
        arrivals = call.arrivals
        with alone(self.model), self._at_work():
            with torch.no_grad():
                prompt = make_rows(self.prompted_model, encoded, params)
            room = self.fit_prompt(call.prompt_width, self.length) - prompt.tokens.shape[1]
            if arrivals is not None and room > 0:
                prompt = replace(prompt, tokens=F.pad(prompt.tokens, (0, room)))
            plan = RowPlan(
                prompt=prompt,
                length=self.length,
                max_num_seqs=call.rows,
                params=params,
                noise=noise,
                arrivals=None if arrivals is None else partial(running.receive, arrivals),
                prefix_tree=call.prefix_tree,
            )
            return self.decode_rows(
                decoding, plan, finish=running.finish, deliver=call.deliver, on_step=call.on_step
            )

    def _render_row(self, request: Request, row: FinishedRow) -> Any:
        """What `render` makes of one row."""
        seed = Noise.from_seed([request.seed], 1).seeds.tolist()
        (made,) = self.prompted_model.render(row.tokens[None], [request.prompt], seed)
        return made
