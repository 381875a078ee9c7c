"""diffusers' `LLaDA2Pipeline` under a policy: its calls are served, its signature stays.

Two kinds of policy. `CachedBlocks` leaves the pipeline's decoder as it is and serves the model's
calls; a canvas policy takes the decoder's place (`mmaccel.pipelines.llada2_canvas`).

Source: `diffusers.pipelines.llada2`, diffusers 0.42.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasInterrupt
from mmaccel.contracts import Layout
from mmaccel.pipelines.block_trial import Line, Verdict
from mmaccel.pipelines.cached_blocks import CachedBlocks, CachedCalls
from mmaccel.pipelines.engine import Engine
from mmaccel.pipelines.inject import Injection, as_function, original
from mmaccel.pipelines.llada2_call import BlockCall, check_prompt
from mmaccel.pipelines.llada2_canvas import decode
from mmaccel.pipelines.llada2_trials import Trials
from mmaccel.pipelines.original_run import find_caller
from mmaccel.pipelines.pipeline_call import bind_call, check_idle
from mmaccel.pipelines.place_store import StoredCalls
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
        self._trials = Trials(self._model, self._own, type(policy).__name__, strict)
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
        cached, self._cached = self._cached, None  # what the trial and the store call is the own
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
        store = StoredCalls(self._model, self._own)
        ask = self._trials.of_mask if self.policy.mask == "blocks" else self._trials.of_call
        cached = CachedCalls(self._own, store, lambda line: ask(line, store), call)
        return self._watched(own, cached, call, args, options)

    def _run_canvas(
        self, own: Callable[..., Any], call: BlockCall, args: Any, options: Any
    ) -> tuple[Any, Stats]:
        calls = StoredCalls(self._model, self._own)
        verdict = self._trials.settle(Verdict(reason=call.obstacle))
        if not verdict.reason:
            verdict = self._trials.of_mask(Line.made_up(calls.device, call.block), calls)
        if verdict.reason:
            cached = CachedCalls(self._own, calls, lambda line: verdict, call)
            return self._watched(own, cached, call, args, options)
        calls.form = verdict.form
        return decode(self._pipe, self.policy, call, calls, self.seed, self.layout)

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
