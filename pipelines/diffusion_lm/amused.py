"""diffusers' `AmusedPipeline` under a canvas policy: its signature and output stay.

The pipeline goes on encoding captions, preparing guidance and turning tokens into images. Its
loop is made to take one step, in which a run of the policy over the pipeline's transformer takes
the place of model and scheduler.

Source: `AmusedPipeline` and `AmusedScheduler`, diffusers 0.42.

aMUSEd's transformer as a `Denoiser`: image tokens of a grid, all of them in every pass.

S. Patil et al., "aMUSEd: An Open MUSE Reproduction", 2024, arXiv 2401.01808; the model is
`diffusers.UVit2DModel`. A caption is a condition of the model and no part of the line, so that the
line is one column that means nothing, and the slots of the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass, CanvasProgress, OnCanvasStep
from mmaccel.contracts import Layout, Prompt
from mmaccel.errors import OptionError
from mmaccel.pipelines.attach.patching import Injection, as_function, original
from mmaccel.pipelines.attach.pipeline_call import bind_call, check_idle, draw_seed
from mmaccel.results import Stats
from mmaccel.samplers.canvas.cache_plan import as_plan
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams


class GridDenoiser:
    """Passes of a canvas run through a model of a grid of tokens.

    Args:
        call: the model, `[R, h, w]` int64 to logits `[R, V, h, w]`.
        conditions: what it is told besides; tensors of `[G * B, ...]`, and what is for all rows.
        grid: (h, w).
        mask_token: what an open slot holds, no id of the codebook.
        vocab_size: V, ids of the codebook.
        branches: G; with 2 the model is told of the unconditional rows first.
    """

    block, supports_kv_cache = None, False

    def __init__(
        self,
        call: Callable[..., Tensor],
        conditions: Mapping[str, Any],
        grid: tuple[int, int],
        mask_token: int,
        vocab_size: int,
        branches: int,
    ) -> None:
        self._call, self._grid, self._branches = call, grid, branches
        self.mask_token, self.vocab_size = mask_token, vocab_size
        self._conditions = {name: self._ordered(value) for name, value in conditions.items()}
        tensors = [value for value in conditions.values() if isinstance(value, Tensor)]
        self.device: torch.device = tensors[0].device

    def reserve(self, rows: int, cache_size: int) -> None:
        """See `Denoiser.reserve`; nothing is kept."""

    def forward(self, entries: CanvasPass) -> Tensor:
        """One pass; see `Denoiser.forward`."""
        rows = entries.tokens.shape[0]
        tokens = entries.tokens[:, 1:].unflatten(1, self._grid)  # [R, h, w]
        told = {name: self._rows(value, rows) for name, value in self._conditions.items()}
        logits = self._call(tokens, **told).flatten(2).transpose(1, 2)  # [R, h * w, V]
        index = (entries.queries - 1)[..., None].expand(-1, -1, self.vocab_size)
        return logits.gather(1, index)

    def _ordered(self, value: Any) -> Any:
        """Conditional rows first."""
        if not isinstance(value, Tensor) or self._branches == 1:
            return value
        return torch.cat(value.chunk(self._branches)[::-1])

    def _rows(self, value: Any, rows: int) -> Any:
        """`[G * B, ...]` for `[G * K * B]` rows."""
        if not isinstance(value, Tensor) or value.shape[0] == rows:
            return value
        split = value.unflatten(0, (self._branches, 1, -1))
        copies = rows // value.shape[0]
        return split.expand(-1, copies, *split.shape[2:]).flatten(0, 2)


class KnownTokens:
    """Layout of a grid some of whose tokens are known.

    Args:
        base: what else is known, or None.
        latents: `[B, h, w]` int64, the mask token where a slot is open.
        mask_token: its id.
    """

    def __init__(self, base: Layout | None, latents: Tensor, mask_token: int) -> None:
        self._base, self._width = base, latents.shape[-1]
        self._known = torch.where(latents == mask_token, -1, latents).flatten(1)  # [B, h * w]

    @property
    def columns(self) -> int:
        """See `Layout`."""
        return self._width

    @property
    def frame(self) -> int:
        """See `Layout`."""
        return self._known.shape[1]

    def forced(self, slots: Tensor) -> Tensor:
        """See `Layout`; `slots` of a run's own rows."""
        known = self._known.gather(1, slots)
        forced = None if self._base is None else self._base.forced(slots)
        return known if forced is None else torch.where(known < 0, forced, known)

    def allowed(self, slots: Tensor) -> Tensor | None:
        """See `Layout`."""
        return None if self._base is None else self._base.allowed(slots)


REFERENCE = "one commit a pass over the pipeline's transformer; not the pipeline's scheduler"


class AmusedService:
    """Serves the calls of one pipeline.

    Args:
        pipe: the pipeline.
        policy: a canvas policy.
        seed, layout: see `mmaccel.attach`.

    Attributes:
        history: statistics of all calls, the last one at the end.
    """

    def __init__(
        self, pipe: Any, policy: Any, seed: int | Sequence[int] | None, layout: Layout | None
    ) -> None:
        self.policy, self.seed, self.layout = policy, seed, layout
        self.history: list[Stats] = []
        self._pipe, self._model, self._scheduler = pipe, pipe.transformer, pipe.scheduler
        self._given: Mapping[str, Any] | None = None
        self._tokens: Tensor | None = None
        self._is_open = False

    def inject(self) -> Injection:
        """Put the service in the place of the pipeline's, the transformer's and the scheduler's own
        methods.

        Raises:
            AttachError: one of them has a policy already.
        """
        injection = Injection()
        try:
            injection.add(self._model, {"__call__": as_function(self._model_call)})
            injection.add(self._scheduler, {"step": as_function(self._step)})
            injection.add(self._pipe, {"__call__": as_function(self._pipe_call)})
        except Exception:
            injection.remove()
            raise
        return injection

    def _pipe_call(self, pipe: Any, *args: Any, **options: Any) -> Any:
        own = original(pipe, "__call__")
        check_idle(self._given is not None)
        given = bind_call(own, args, options)
        if given is None:
            return own(*args, **options)
        steps = given["num_inference_steps"]
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise OptionError(
                f"num_inference_steps: expected an integer >= 1, received {steps!r}; leave it out, "
                "the policy says how many passes there are"
            )
        self._given, self._is_open = given, True
        try:
            return own(**given | {"num_inference_steps": 1, "callback": None})
        finally:
            self._given = self._tokens = None
            self._is_open = False

    def _model_call(self, model: Any, shown: Tensor, *args: Any, **told: Any) -> Any:
        call = original(model, "__call__")
        if not self._is_open or self._given is None:
            return call(shown, *args, **told)
        self._is_open = False  # a callback that calls the model gets the model
        branches = 2 if self._given["guidance_scale"] > 1.0 else 1
        self._tokens = self._decode(shown.chunk(branches)[0], call, told, branches)
        return torch.zeros(branches, 1, device=shown.device)  # halves of nothing, for guidance

    def _step(self, scheduler: Any, *args: Any, **options: Any) -> Any:
        if self._tokens is None:
            return original(scheduler, "step")(*args, **options)
        from diffusers.schedulers.scheduling_amused import AmusedSchedulerOutput

        return AmusedSchedulerOutput(self._tokens)

    def _decode(
        self, latents: Tensor, call: Callable[..., Any], told: Mapping[str, Any], branches: int
    ) -> Tensor:
        """Tokens `[B, h, w]` for latents that may hold some of them already."""
        given = self._given
        assert given is not None
        mask_token, size = self._scheduler.config.mask_token_id, self._model.config.codebook_size
        batch, height, width = latents.shape
        model = GridDenoiser(call, told, (height, width), mask_token, size, branches)
        seed = self.seed
        if seed is None:
            seed = draw_seed(given["generator"])
        line = latents.new_full((branches * batch, 1), 0 if mask_token else 1)
        layout = KnownTokens(self.layout, latents, mask_token)
        prompt = Prompt(line, torch.ones_like(line[:, 0]), branches=branches, layout=layout)
        made = self.policy.sample(
            model,
            prompt,
            height * width,
            params=SamplingParams(guidance_scale=given["guidance_scale"] if branches > 1 else 1.0),
            noise=Noise.from_seed(seed, batch, latents.device),
            on_step=_tell(given, (height, width), mask_token),
        )
        made.stats.reference = REFERENCE
        self.history.append(made.stats)
        tokens: Tensor = made.tokens.view(batch, height, width)
        return tokens


def _tell(given: Mapping[str, Any], grid: tuple[int, int], mask_token: int) -> OnCanvasStep | None:
    """The pipeline's callback, told after every pass."""
    callback, every = given["callback"], given["callback_steps"]
    if callback is None:
        return None

    def on_step(progress: CanvasProgress) -> None:
        step, done = progress.passes - 1, progress.is_committed
        if step % every == 0:
            latents = torch.where(done, progress.tokens, mask_token).unflatten(1, grid)
            callback(step, (~done).sum(1).max(), latents)

    return on_step


def serve(
    pipe: Any,
    policy: Any,
    seed: int | Sequence[int] | None,
    strict: bool,
    layout: Layout | None,
) -> tuple[AmusedService, Injection]:
    """Attach a checked policy to a pipeline; there is no call that `strict` would refuse.

    Raises:
        OptionError: a policy with a cache or shadows, or a layout of another vocabulary.
        AttachError: the pipeline or a part of it has a policy already.
    """
    cache = as_plan(getattr(policy, "cache", "none"))
    if cache.kind != "none" or cache.far is not None:
        raise OptionError(
            f"policy: expected one without a cache for a {type(pipe).__name__}, received "
            f"{policy!r}; its passes are over the whole grid, leave the cache out"
        )
    if getattr(policy, "revise", "") == "shadow" or getattr(policy, "layout", "") == "entries":
        raise OptionError(
            f"policy: expected one whose passes are rows for a {type(pipe).__name__}, which keeps "
            f'no keys, received {policy!r}; choose revise="edit" or "redo", or layout="rows"'
        )
    size, ids = getattr(layout, "vocab_size", None), pipe.transformer.config.codebook_size
    if size not in (None, ids):
        raise OptionError(
            f"layout: expected the codebook's {ids} ids, received a layout of {size}; "
            f"give it vocab_size={ids}"
        )
    service = AmusedService(pipe, policy, seed, layout)
    return service, service.inject()
