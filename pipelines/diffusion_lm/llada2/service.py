"""diffusers' `LLaDA2Pipeline` under a policy.

There are two kinds of policy. `CachedBlocks` keeps the pipeline's decoder and serves the model's
calls. A canvas policy replaces the decoder (`mmaccel.pipelines.diffusion_lm.llada2.canvas`).

Source: `diffusers.pipelines.llada2`, diffusers 0.42.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import LAYER_METHODS, NOT_OF_CANVASES
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.attach.service import Methods
from mmaccel.pipelines.diffusion_lm.arguments import pipeline_table, read_schedule
from mmaccel.pipelines.diffusion_lm.cached import lack_of_blocks
from mmaccel.pipelines.diffusion_lm.cached_passes import CachedPasses
from mmaccel.pipelines.diffusion_lm.llada2.block_cache import (
    CALLBACK_TENSORS,
    BlockCall,
    CachedBlocks,
    CachedCalls,
)
from mmaccel.pipelines.diffusion_lm.llada2.block_masks import BlockMasks, find_masks
from mmaccel.pipelines.diffusion_lm.llada2.canvas import BlockDenoiser, decode
from mmaccel.pipelines.diffusion_lm.llada2.self_check import check_call
from mmaccel.pipelines.diffusion_lm.pipeline_service import PolicyService
from mmaccel.pipelines.diffusion_lm.self_check import find_fault
from mmaccel.pipelines.generate_call import bind_call
from mmaccel.pipelines.original_methods import original
from mmaccel.policies import CanvasInterrupt
from mmaccel.results import Generation, Stats

ARGUMENTS = pipeline_table(
    "prompt messages input_ids attention_mask use_chat_template add_generation_prompt gen_length "
    "block_length num_inference_steps temperature top_p top_k sampling_method eos_early_stop "
    "eos_token_id mask_token_id generator output_type return_dict callback_on_step_end "
    "callback_on_step_end_tensor_inputs",
    refused=("threshold", "editing_threshold", "max_post_steps", "minimal_topk"),
)


class LLaDA2Service(PolicyService):
    """Serves the calls of one pipeline under `CachedBlocks` or a canvas policy."""

    def open(self) -> None:
        self._model = self.target.model
        declared = find_masks(self._model)
        name = type(self._model).__name__
        self._masks = declared or BlockMasks()
        self._undeclared = ""
        if declared is None:
            self._undeclared = (
                f"nobody has declared how a {name} reads masks; see BLOCK_MASKS in docs/attach.md"
            )
        self._reasons: dict[tuple[Any, ...], str] = {}  # of self-checks
        self.n_ids = getattr(getattr(self._model, "config", None), "vocab_size", None)

    def lack(self, word: str, part: Any = None) -> str:
        if word not in LAYER_METHODS:
            return "" if word == "own scheduler" else NOT_OF_CANVASES.get(word, "")
        return self._undeclared or lack_of_blocks(self._make_cached_model(), word, part)

    def methods(self) -> list[tuple[Any, Methods]]:
        of_pipe: Methods = {
            "__call__": self._pipe_call,
            "_prepare_input_ids": self._prepare_input_ids,
        }
        return [(self._model, {"__call__": self._model_call}), (self.target, of_pipe)]

    def _model_call(self, model: Any, *args: Any, **options: Any) -> Any:
        call = self.call
        if call is None or call.served is None:
            return self._own(*args, **options)
        served, call.served = call.served, None  # passes and self-checks call the model itself
        try:
            return served(*args, **options)
        finally:
            call.served = served

    def _own(self, *args: Any, **options: Any) -> Any:
        return original(self._model, "__call__")(*args, **options)

    def _prepare_input_ids(self, pipe: Any, **options: Any) -> tuple[Tensor, Tensor]:
        ids, mask = original(pipe, "_prepare_input_ids")(**options)
        if self.call is not None:
            mask_token = self.call.mask_token
            found = ((ids == mask_token) & mask.to(ids.device).bool()).view(-1, ids.shape[-1])
            if bool(found.any()):  # the pipeline would fill it in one block, and leave it in others
                raise OptionError(
                    f"prompt: expected no mask token, received id {mask_token} in row "
                    f"{int(found.any(1).nonzero()[0])}; leave the open slots to gen_length"
                )
            self.call.n_prompt = ids.shape[-1]
        return ids, mask

    def _pipe_call(self, pipe: Any, *args: Any, **options: Any) -> Any:
        own = original(pipe, "__call__")
        bound = bind_call(own, args, options)
        call = None if bound is None else BlockCall.of(pipe, *bound)
        if call is None:
            return own(*args, **options)
        began = time.perf_counter()
        with self.running(call):
            if isinstance(self.policy, CachedBlocks):
                out, stats = self._run_cached(own, call, args, options)
            else:
                out, stats = self._run_canvas(own, call, args, options)
        stats.seconds = time.perf_counter() - began
        self.record(stats)
        return out

    def _run_cached(
        self, own: Callable[..., Any], call: BlockCall, args: Any, options: Any
    ) -> tuple[Any, Stats]:
        check = self._check_call
        reading = self._masks.reading
        if self.policy.mask == "blocks":
            check = self._check_mask
            reading = "blocks"
        check_run = partial(check, call.block)
        cached = CachedCalls(self._own, self._make_cached_model(), reading, check_run, call)
        return self._run_pipeline(own, call, cached, args, options)

    def _run_canvas(
        self, own: Callable[..., Any], call: BlockCall, args: Any, options: Any
    ) -> tuple[Any, Stats]:
        passes = self._make_cached_model()
        reason = ""
        beyond = [name for name in call.callback_tensors if name not in CALLBACK_TENSORS]
        if call.arguments.get("callback_on_step_end") is not None and beyond:
            reason = f"a callback that asks for {', '.join(beyond)} of the pipeline's own scheduler"
        reason = self._refuse(reason) or self._check_mask(call.block)
        if reason:
            cached = CachedCalls(self._own, passes, None, lambda _: reason, call)
            return self._run_pipeline(own, call, cached, args, options)
        policy = read_schedule(ARGUMENTS, call.asked, self.policy)
        model = BlockDenoiser(passes, call.mask_token, call.block)
        model.use_methods(self.layer_methods)
        out, stats = decode(self.target, policy, call, model, self.seed, self.layout)
        self.layer_methods.record(stats, model)
        return out, stats

    def _make_cached_model(self) -> CachedPasses:
        """A new one with its own cache: a self-check may run in the middle of a call."""
        return CachedPasses(self._model, form=self._masks.form, reports_past_only=True)

    def _check_call(self, block: int, is_padded: bool) -> str:
        """Why nothing can be cached of the pipeline's own call, with its 2-D mask.

        Raises:
            UnsupportedModelError: a model that takes no 2-D mask; with `strict`, any reason.
        """
        model = self._make_cached_model()
        key = (block, is_padded, model.dtype)
        if key not in self._reasons:
            self._reasons[key] = self._undeclared or check_call(
                model, self._masks.reading, block, is_padded, self._own_logits
            )
        return self._refuse(self._reasons[key])

    def _check_mask(self, block: int, is_padded: bool = False) -> str:
        """Why the model cannot be run under 4-D block masks, with padding or without.

        Raises:
            UnsupportedModelError: with `strict`, where there is a reason.
        """
        model = self._make_cached_model()
        key = (block, model.dtype)
        if self._undeclared:
            return self._refuse(self._undeclared)
        if key not in self._reasons:
            fault = find_fault(BlockDenoiser(model, 0, block))
            said = (
                f"the model does not follow a 4-D mask of blocks of {block} of form {model.form!r} "
                f"(it gives {fault})"
            )
            self._reasons[key] = said if fault else ""
        return self._refuse(self._reasons[key])

    def _refuse(self, reason: str) -> str:
        """The reason itself; with `strict`, an error where there is one."""
        if reason and self.strict:
            raise UnsupportedModelError(
                f"pipeline: expected a call that {type(self.policy).__name__} can serve, received "
                f"one where {reason}; attach with strict=False to run it without"
            )
        return reason

    def _own_logits(self, ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        """Logits of the model's own call, with the pipeline's arguments."""
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

    def _run_pipeline(
        self, own: Callable[..., Any], call: BlockCall, cached: CachedCalls, args: Any, options: Any
    ) -> tuple[Any, Stats]:
        """The pipeline's own decoder over `cached` calls of the model."""
        call.served = cached
        try:
            out = own(*args, **options)
        except KeyboardInterrupt as stop:
            if cached.tokens is None:
                raise
            tokens, is_committed = cached.canvas(cached.tokens)
            stats = cached.report(self.policy, int(is_committed.sum()), tokens.shape[0])
            passes = torch.full_like(tokens[:, 0], cached.passes)
            generation = Generation(tokens, is_committed.sum(1), passes, stats)
            raise CanvasInterrupt(generation, is_committed) from stop
        sequences = out[0]
        return out, cached.report(self.policy, cached.count(sequences), sequences.shape[0])
