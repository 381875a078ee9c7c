"""Image runs of commands, batches, the server and nodes: one loaded model for several sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmaccel.contracts import CanvasPolicy, OnCanvasStep, Policy
from mmaccel.pipelines.call_options import AnyMethod
from mmaccel.pipelines.text_to_image.model import Encoded
from mmaccel.pipelines.text_to_image.outputs import ImageOutput, Request, RequestOutput
from mmaccel.pipelines.text_to_image.prompted import PromptPipeline
from mmaccel.results import OnStep, Stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.run_lock import alone
from mmaccel.samplers.sampling_params import SamplingParams

_WARM_UP_PASSES = 3


@dataclass(frozen=True)
class GenerationSettings:
    """How images are made.

    Attributes:
        name: short name of the policy.
        policy: the policy.
        params: guidance, temperature and truncation.
        kv_cache, attention: methods of the model's layers; None for none.
    """

    name: str
    policy: Any
    params: SamplingParams
    kv_cache: AnyMethod = None
    attention: AnyMethod = None


class ImageGenerator:
    """A model that is loaded once and serves requests of any of its image sizes.

    Args:
        pipe: the model.

    Attributes:
        pipe: the model in the size that was asked for last.
    """

    def __init__(self, pipe: PromptPipeline) -> None:
        self.pipe = pipe
        self._default_size = pipe.size

    def resize(self, size: tuple[int, int] | None) -> PromptPipeline:
        """Switch to another image size, with the same weights; None is the size at loading.

        Raises:
            OptionError: a size that the model does not have.
        """
        size = size or self._default_size
        if size != self.pipe.size:
            self.pipe = self.pipe.resize(size)
        return self.pipe

    def draw(
        self,
        requests: Sequence[Request],
        settings: GenerationSettings,
        rows: int,
        on_step: OnStep | OnCanvasStep | None = None,
        deliver: Callable[[RequestOutput], None] | None = None,
        encoded: Encoded | None = None,
    ) -> ImageOutput:
        """Make images and return them together, in the order of the requests.

        Args:
            requests: each with its own index as its tag.
            settings, rows, on_step: as in `run_all`.
            deliver: called with every image as soon as it is finished.
            encoded: as in `PromptPipeline.serve`.
        """
        made: dict[int, RequestOutput] = {}

        def keep(output: RequestOutput) -> None:
            made[output.request.tag] = output
            if deliver is not None:
                deliver(output)

        stats = self.run_all(requests, settings, keep, rows, on_step, encoded=encoded)
        done = [made[k] for k in range(len(requests))]
        tokens = torch.stack([each.tokens for each in done])
        passes = tokens.new_tensor([each.passes for each in done])
        prompts = [request.prompt for request in requests]
        return ImageOutput([each.image for each in done], tokens, passes, stats, prompts)

    def run_all(
        self,
        requests: Sequence[Request],
        settings: GenerationSettings,
        deliver: Callable[[RequestOutput], None],
        rows: int,
        on_step: OnStep | OnCanvasStep | None = None,
        *,
        encoded: Encoded | None = None,
    ) -> Stats:
        """Make images in the present size; see `PromptPipeline.serve`."""
        return self.pipe.serve(
            requests,
            settings.params,
            policy=settings.policy,
            kv_cache=settings.kv_cache,
            attention=settings.attention,
            rows=rows,
            deliver=deliver,
            on_step=on_step,
            encoded=encoded,
        )


def warm_up(
    pipe: PromptPipeline,
    policy: Policy | CanvasPolicy,
    params: SamplingParams,
    text: str,
    rows: int,
    callback: Callable[[], None] | None = None,
) -> float:
    """Run a few passes, so that the first measured image does not pay for allocations.

    The tokens are not decoded to pixels, which takes some models long.

    Args:
        pipe: the model.
        policy, params: as they will be measured.
        text: prompt of the images, which are thrown away.
        rows: images decoded together.
        callback: called after every pass; an exception from it ends the warming up.

    Returns:
        Seconds of a pass, without the first.
    """
    ends: list[float] = []

    def stop(progress: Any) -> Any:
        ends.append(time.perf_counter())
        if callback is not None:
            callback()
        return torch.zeros_like(progress.lengths) if progress.passes >= _WARM_UP_PASSES else None

    prompted = pipe.prompted_model
    window = prompted.window
    encoded = [prompted.encode(text)] * rows
    noise = Noise.from_seed(0, rows, window.device)
    with alone(window), torch.no_grad():
        prompt = prompted.prompt(encoded, params.guidance_scale != 1)
        pipe.engine.prepare(window, prompt, policy, params)
        policy.sample(window, prompt, pipe.length, params=params, noise=noise, on_step=stop)
    return (ends[-1] - ends[0]) / max(1, len(ends) - 1)
