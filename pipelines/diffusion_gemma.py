"""DiffusionGemma's `generate` under a canvas policy: its call and what it returns stay.

The library's `generate` goes on making the loop over canvases: lengths, the encoder and its cache,
masks, logits processors, end tokens, stopping criteria, streamer. Its step within a canvas is
replaced by a run of the policy over the whole canvas.

Source: `DiffusionGemmaGenerationMixin`, transformers 5.23.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Layout
from mmaccel.errors import BusyError, OptionError, UnsupportedModelError
from mmaccel.pipelines.diffusion_gemma_run import GemmaRun
from mmaccel.pipelines.inject import Injection, original
from mmaccel.pipelines.layout_mask import check_vocabulary
from mmaccel.pipelines.original_run import find_caller
from mmaccel.results import Stats
from mmaccel.samplers.cache_plan import as_plan
from mmaccel.samplers.lossless_unmask import LosslessUnmask


class GemmaService:
    """Serves the calls of one model.

    Args:
        model: a `DiffusionGemmaForBlockDiffusion`.
        policy, seed, strict, layout: see `mmaccel.attach`.

    Attributes:
        history: statistics of all calls, the last one at the end.
    """

    def __init__(
        self,
        model: Any,
        policy: Any,
        seed: int | Sequence[int] | None = None,
        strict: bool = False,
        layout: Layout | None = None,
    ) -> None:
        self.policy, self.seed, self.strict, self.layout = policy, seed, strict, layout
        self.history: list[Stats] = []
        self._model = model
        self._run: GemmaRun | None = None

    def inject(self, injection: Injection) -> None:
        """Put the service in the place of the model's own methods.

        Raises:
            AttachError: the model has a policy already.
        """
        injection.add(
            self._model,
            {
                "generate": as_function(self._generate),
                "_prepare_generation_config": as_function(self._configure),
                "_denoising_step": as_function(self._step),
                "_compute_tokens_per_forward": as_function(self._rate),
            },
        )

    def serve(self, run: GemmaRun, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The library's `generate` with a run of the policy in it.

        Raises:
            BusyError: another call is under way.
            UnsupportedModelError: with `strict` or a layout, a call that only the library's own
                sampler can serve.
        """
        own = original(self._model, "generate")
        if self._run is not None:
            raise BusyError(
                "generate: expected one call at a time, received one while another runs; load the "
                "model a second time for it"
            )
        try:
            ids = inspect.signature(own).bind(*args, **options).arguments.get("input_ids")
        except TypeError:
            return own(*args, **options)  # which says what is wrong with them
        if ids is None or ids.ndim != 2:
            return own(*args, **options)
        began = time.perf_counter()
        run.begin(ids.shape[0], ids.device)
        self._run = run
        try:
            out = own(*args, **options)
        finally:
            self._run = None
        run.stats.seconds = time.perf_counter() - began
        self.history.append(run.stats)
        if run.reason:
            text = f"mmaccel: ran without the policy: {run.reason}"
            warnings.warn(text, stacklevel=find_caller())
        return out

    def _generate(self, model: Any, *args: Any, **options: Any) -> Any:
        run = GemmaRun(model, self.policy, self.seed, self.layout)
        return self.serve(run, args, options)

    def _configure(self, model: Any, *args: Any, **options: Any) -> Any:
        config, others = original(model, "_prepare_generation_config")(*args, **options)
        run = self._run
        if run is None:
            return config, others
        if "decoder_input_ids" in others:
            run.reason = "a canvas to begin with (decoder_input_ids)"
            if self.strict or self.layout is not None:
                raise UnsupportedModelError(
                    f"generate: expected a call that {self.policy!r} can serve, received "
                    f"{run.reason}; leave it out, or attach with strict=False and no layout"
                )
            run.stats.fallbacks.append(run.reason)
            return config, others
        run.configure(config, model.device)
        return config, others

    def _step(self, model: Any, **step: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = self._run
        if run is None or run.reason:
            if run is not None:
                run.stats.passes += 1
            out: tuple[Tensor, ...] = original(model, "_denoising_step")(**step)
            return out  # type: ignore[return-value]
        tokens, scores = run.fill(step)
        return tokens, tokens, scores, torch.ones_like(step["finished_denoising"])

    def _rate(self, model: Any, ids: Tensor, passes: Tensor, *others: Any) -> Any:
        own: Callable[..., Any] = original(model, "_compute_tokens_per_forward").__func__  # type: ignore[attr-defined]
        if self._run is not None and not self._run.reason:
            passes = self._run.passes.clamp(min=1)
        return own(ids, passes, *others)


def as_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a class can hold, of a method of another object."""
    return lambda *args, **options: method(*args, **options)


def check_gemma(policy: Any, name: str) -> None:
    """Refuse what cannot fill canvases of this model.

    Raises:
        OptionError: with the reason.
    """
    reason = ""
    if isinstance(policy, LosslessUnmask):
        reason = "a pass carries the logits of the one before, so that drafts cannot be verified"
    cache = as_plan(getattr(policy, "cache", "none"))
    if cache.kind != "none" or cache.far is not None:
        reason = "its encoder keeps what can be kept, and every pass is over the whole canvas"
    if reason:
        raise OptionError(
            f"policy: expected another one for a {name}, received {policy!r}; {reason}; "
            "try EntropyBounded()"
        )


def serve(
    model: Any,
    policy: Any,
    seed: int | Sequence[int] | None,
    strict: bool,
    layout: Layout | None,
) -> tuple[GemmaService, Injection]:
    """Attach a checked policy to a model.

    Raises:
        OptionError: a policy that cannot fill its canvases, or a layout of another vocabulary.
        AttachError: the model has a policy already.
    """
    check_gemma(policy, type(model).__name__)
    check_vocabulary(layout, model)
    service, injection = GemmaService(model, policy, seed, strict, layout), Injection()
    service.inject(injection)
    return service, injection
