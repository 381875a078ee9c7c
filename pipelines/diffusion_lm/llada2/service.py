"""diffusers' `LLaDA2Pipeline` under a policy: its calls are served, its signature stays.

Two kinds of policy. `CachedBlocks` leaves the pipeline's decoder as it is and serves the model's
calls; a canvas policy takes the decoder's place (`mmaccel.pipelines.diffusion_lm.llada2.canvas`).

Source: `diffusers.pipelines.llada2`, diffusers 0.42.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasInterrupt
from mmaccel.contracts import Layout
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.attach.fallback import find_caller
from mmaccel.pipelines.attach.patching import Injection, as_function, original
from mmaccel.pipelines.attach.pipeline_call import bind_call, check_idle
from mmaccel.pipelines.diffusion_lm.llada2.block_cache import CachedBlocks, CachedCalls
from mmaccel.pipelines.diffusion_lm.llada2.block_masks import BlockMasks, find_masks
from mmaccel.pipelines.diffusion_lm.llada2.call import BlockCall, check_prompt
from mmaccel.pipelines.diffusion_lm.llada2.canvas import decode
from mmaccel.pipelines.diffusion_lm.llada2.key_store import StoredCalls
from mmaccel.pipelines.diffusion_lm.llada2.self_check import check_block_mask, check_call
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.results import Generation, Stats


class LLaDA2Service:
    """Serves the calls of one pipeline.

    Args:
        pipe: the pipeline.
        policy: `CachedBlocks` or a canvas policy.
        seed: of a canvas policy; see `mmaccel.attach`.
        strict: raise instead of running the original.
        layout: of a canvas policy.

    Attributes:
        history: statistics of all calls, the last one at the end.
    """

    def __init__(
        self,
        pipe: Any,
        policy: Any,
        seed: int | Sequence[int] | None = None,
        strict: bool = False,
        layout: Layout | None = None,
    ) -> None:
        self.policy, self.seed, self.layout = policy, seed, layout
        self.history: list[Stats] = []
        self.engine = Engine(False)  # which a handle closes
        self._pipe, self._model = pipe, pipe.model
        self._call: BlockCall | None = None
        self._cached: CachedCalls | None = None
        self._strict, declared = strict, find_masks(self._model)
        self._masks = declared or BlockMasks()
        name = type(self._model).__name__
        said = f"nobody has declared how a {name} reads masks; see BLOCK_MASKS in docs/attach.md"
        self._undeclared = "" if declared else said
        self._reasons: dict[tuple[Any, ...], str] = {}  # of self-checks
        self._warned: set[str] = set()

    def inject(self) -> Injection:
        """Put the service in the place of the pipeline's and the model's own methods.

        Raises:
            AttachError: one of them has a policy already.
        """
        injection = Injection()
        try:
            injection.add(self._model, {"__call__": as_function(self._model_call)})
            injection.add(
                self._pipe,
                {
                    "__call__": as_function(self._pipe_call),
                    "_prepare_input_ids": as_function(self._prepare_input_ids),
                },
            )
        except Exception:
            injection.remove()
            raise
        return injection

    def _model_call(self, model: Any, *args: Any, **options: Any) -> Any:
        if self._cached is None:
            return self._own(*args, **options)
        cached, self._cached = self._cached, None  # passes and self-checks call the model itself
        try:
            return cached(*args, **options)
        finally:
            self._cached = cached

    def _own(self, *args: Any, **options: Any) -> Any:
        return original(self._model, "__call__")(*args, **options)

    def _prepare_input_ids(self, pipe: Any, **options: Any) -> tuple[Tensor, Tensor]:
        ids, mask = original(pipe, "_prepare_input_ids")(**options)
        if self._call is not None:
            check_prompt(ids, mask, self._call.mask_token)
            self._call.n_prompt = ids.shape[-1]
        return ids, mask

    def _pipe_call(self, pipe: Any, *args: Any, **options: Any) -> Any:
        own = original(pipe, "__call__")
        check_idle(self._call is not None)
        given = bind_call(own, args, options)
        if given is None:
            return own(*args, **options)
        call = BlockCall.of(pipe, given)
        if not call.is_sound:
            return own(*args, **options)
        began = time.perf_counter()
        self._call = call
        try:
            if isinstance(self.policy, CachedBlocks):
                out, stats = self._run_cached(own, call, args, options)
            else:
                out, stats = self._run_canvas(own, call, args, options)
        finally:
            self._call = self._cached = None
        stats.seconds = time.perf_counter() - began
        self.history.append(stats)
        for reason in stats.fallbacks:
            if reason not in self._warned:
                self._warned.add(reason)
                text = f"mmaccel: ran without the policy: {reason}"
                warnings.warn(text, stacklevel=find_caller())
        return out

    def _run_cached(
        self, own: Callable[..., Any], call: BlockCall, args: Any, options: Any
    ) -> tuple[Any, Stats]:
        check, reading = self._check_call, self._masks.reading
        if self.policy.mask == "blocks":
            check, reading = self._check_mask, "blocks"
        cached = CachedCalls(self._own, self._open(), reading, partial(check, call.block), call)
        return self._watched(own, cached, call, args, options)

    def _run_canvas(
        self, own: Callable[..., Any], call: BlockCall, args: Any, options: Any
    ) -> tuple[Any, Stats]:
        calls = self._open()
        reason = self._refuse(call.obstacle) or self._check_mask(call.block)
        if reason:
            cached = CachedCalls(self._own, calls, None, lambda _: reason, call)
            return self._watched(own, cached, call, args, options)
        return decode(self._pipe, self.policy, call, calls, self.seed, self.layout)

    def _open(self) -> StoredCalls:
        """A store of its own: a self-check may come in the middle of a run."""
        return StoredCalls(self._model, self._own, self._masks.form)

    def _check_call(self, block: int, is_padded: bool) -> str:
        """Why nothing can be cached of the call that the pipeline makes, with its 2-D mask.

        Raises:
            UnsupportedModelError: a model that takes no 2-D mask; with `strict`, also one of which
                nothing can be cached.
        """
        calls = self._open()
        key = (block, is_padded, calls.dtype)
        if key not in self._reasons:
            self._reasons[key] = self._undeclared or check_call(
                calls, self._masks.reading, block, is_padded, self._ask
            )
        return self._refuse(self._reasons[key])

    def _check_mask(self, block: int, is_padded: bool = False) -> str:
        """Why the model cannot be run under 4-D block masks, whether they hide padding or not.

        Raises:
            UnsupportedModelError: with `strict`, where there is a reason.
        """
        calls = self._open()
        key = (block, calls.dtype)
        if key not in self._reasons:
            self._reasons[key] = self._undeclared or check_block_mask(calls, block)
        return self._refuse(self._reasons[key])

    def _refuse(self, reason: str) -> str:
        """The reason, or an error where there is no way around it."""
        if reason and self._strict:
            raise UnsupportedModelError(
                f"pipeline: expected a call that {type(self.policy).__name__} can serve, received "
                f"one where {reason}; attach with strict=False to run it without"
            )
        return reason

    def _ask(self, ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        """Logits of the model's own call, as the pipeline makes it."""
        try:
            out = self._own(ids, attention_mask=visible, position_ids=positions)
        except (TypeError, ValueError) as error:
            name = type(self._model).__name__
            raise UnsupportedModelError(
                f"model: expected one that takes the pipeline's 2-D mask, received a {name} "
                f"that does not ({' '.join(str(error).split())[:80]}); attach "
                "CachedBlocks(mask='blocks')"
            ) from error
        logits: Tensor = out.logits
        return logits

    def _watched(
        self, own: Callable[..., Any], cached: CachedCalls, call: BlockCall, args: Any, options: Any
    ) -> tuple[Any, Stats]:
        """The pipeline's own decoder over `cached` calls of the model."""
        self._cached = cached
        try:
            out = own(*args, **options)
        except KeyboardInterrupt as stop:
            if cached.shown is None:
                raise
            tokens, is_committed = call.canvas(cached.shown)
            stats = cached.report(self.policy, int(is_committed.sum()), tokens.shape[0])
            passes = torch.full_like(tokens[:, 0], cached.passes)
            made = Generation(tokens, is_committed.sum(1), passes, stats)
            raise CanvasInterrupt(made, is_committed) from stop
        sequences = out[0]
        return out, cached.report(self.policy, call.count(sequences), sequences.shape[0])


def serve(
    pipe: Any,
    policy: Any,
    seed: int | Sequence[int] | None,
    strict: bool,
    layout: Layout | None,
) -> tuple[LLaDA2Service, Injection]:
    """Attach a checked policy to a pipeline.

    Raises:
        AttachError: the pipeline or its model has a policy already.
    """
    service = LLaDA2Service(pipe, policy, seed, strict, layout)
    return service, service.inject()
