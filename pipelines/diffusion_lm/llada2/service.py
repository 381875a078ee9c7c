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
from mmaccel.pipelines.diffusion_lm.cached import CachedDenoiser, lack_of_blocks
from mmaccel.pipelines.diffusion_lm.cached_passes import CachedPasses
from mmaccel.pipelines.diffusion_lm.llada2.block_cache import (
    CALLBACK_TENSORS,
    BlockCall,
    CachedBlocks,
    CachedCalls,
)
from mmaccel.pipelines.diffusion_lm.llada2.block_masks import BlockMasks, find_masks, make_reads
from mmaccel.pipelines.diffusion_lm.llada2.canvas import decode
from mmaccel.pipelines.diffusion_lm.pipeline_service import PolicyService
from mmaccel.pipelines.diffusion_lm.self_check import find_fault
from mmaccel.pipelines.generate_call import bind_call
from mmaccel.pipelines.original_methods import original
from mmaccel.policies import CanvasInterrupt
from mmaccel.results import Generation, Stats
from mmaccel.samplers.arithmetic import own_arithmetic
from mmaccel.samplers.compare_logits import Tolerance, same_logits

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
        return self._undeclared or lack_of_blocks(self._open_passes(), word, part)

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
        run = partial(own, *args, **options)
        with self.running(call):
            if not isinstance(self.policy, CachedBlocks):
                out, stats = self._run_canvas(run, call)
            elif self.policy.mask == "blocks":
                check = partial(self._check_mask, call.block)
                out, stats = self._run_cached(run, call, "blocks", check)
            else:
                check = partial(self._check_call, call.block)
                out, stats = self._run_cached(run, call, self._masks.reading, check)
        stats.seconds = time.perf_counter() - began
        self.record(stats)
        return out

    def _run_cached(
        self,
        run: Callable[[], Any],
        call: BlockCall,
        reading: str | None,
        check: Callable[[bool], str],
    ) -> tuple[Any, Stats]:
        """The pipeline's own decoder, whose calls of the model are served; see `CachedCalls`."""
        call.served = cached = CachedCalls(self._own, self._open_passes(), reading, check, call)
        try:
            out = run()
        except KeyboardInterrupt as stop:
            if cached.tokens is None:
                raise
            tokens, is_committed = cached.canvas(cached.tokens)
            stats = cached.report(self.policy, tokens)
            stats.tokens = int(is_committed.sum())
            passes = torch.full_like(tokens[:, 0], stats.passes)
            generation = Generation(tokens, is_committed.sum(1), passes, stats)
            raise CanvasInterrupt(generation, is_committed) from stop
        return out, cached.report(self.policy, out[0])

    def _run_canvas(self, run: Callable[[], Any], call: BlockCall) -> tuple[Any, Stats]:
        reason = ""
        beyond = [name for name in call.callback_tensors if name not in CALLBACK_TENSORS]
        if call.arguments.get("callback_on_step_end") is not None and beyond:
            reason = f"a callback that asks for {', '.join(beyond)} of the pipeline's own scheduler"
        reason = self._refuse(reason) or self._check_mask(call.block)
        if reason:
            return self._run_cached(run, call, None, lambda _: reason)
        policy = read_schedule(ARGUMENTS, call.asked, self.policy)
        model = CachedDenoiser(self._open_passes(), call.mask_token, block=call.block)
        model.use_methods(self.layer_methods)
        out, stats = decode(self.target, policy, call, model, self.seed, self.layout)
        self.layer_methods.record(stats, model)
        return out, stats

    def _open_passes(self) -> CachedPasses:
        """New ones with their own cache: a self-check may run in the middle of a call."""
        return CachedPasses(self._model, form=self._masks.form, reports_past_only=True)

    def _checked(self, key: tuple[Any, ...], compare: Callable[[], str]) -> str:
        """Why nothing can be cached, by a self-check that runs once for each key.

        Raises:
            UnsupportedModelError: with `strict`, where there is a reason.
        """
        if not self._undeclared and key not in self._reasons:
            self._reasons[key] = compare()
        return self._refuse(self._undeclared or self._reasons[key])

    def _check_call(self, block: int, is_padded: bool) -> str:
        """Why nothing can be cached of the pipeline's own call, with its 2-D mask.

        Three blocks of random tokens go through the model in one such call, and then as one block
        and two more over its cached keys and values. With padding, one row has more than a block of
        it on the left, as prompts do, and the other has a part of a block on the right, as after
        the last token; models may run other code then.

        Raises:
            UnsupportedModelError: a model that takes no 2-D mask; with `strict`, any reason.

        Cost: three passes, once for each block and dtype.
        """
        passes, reading = self._open_passes(), self._masks.reading
        n = 3 * block

        def compare() -> str:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(passes.config.vocab_size, (2, n), generator=generator, device="cpu")
            visible = torch.ones_like(ids)
            if is_padded:
                visible[0, : block + 1] = 0
                visible[1, n - (block + 1) // 2 :] = 0
            ids, visible = ids.to(passes.device), visible.to(passes.device)
            columns = torch.arange(n, device=ids.device).expand(2, -1)
            with own_arithmetic(), torch.no_grad():
                own = self._own_logits(ids, visible, columns)
            if reading is None:
                return (
                    "logits of earlier blocks change with later ones under the 2-D mask that the "
                    "pipeline passes, as BLOCK_MASKS declares, so their keys and values cannot be "
                    "cached"
                )

            def run_cached() -> list[Tensor]:
                passes.reserve(2, n)
                parts = []
                for first, last in ((0, block), (block, n)):
                    reads = make_reads(visible[:, :last], first, block, reading)
                    at = columns[:, first:last]
                    parts.append(passes.run_all(ids[:, first:last], at, at, reads))
                return [torch.cat(parts, 1)]

            tolerance = Tolerance.strict(passes.dtype)
            found = same_logits(lambda: [own], run_cached, tolerance, where=visible.bool())
            kind = "padded" if is_padded else "unpadded"
            said = (
                f"{kind} passes over cached blocks of {block} do not give the logits of the "
                f"model's own call but {found} where its 2-D mask is read as {reading!r}"
            )
            return said if found else ""

        return self._checked((block, is_padded, passes.dtype), compare)

    def _check_mask(self, block: int, is_padded: bool = False) -> str:
        """Why the model cannot be run under 4-D block masks, with padding or without.

        Raises:
            UnsupportedModelError: with `strict`, where there is a reason.
        """
        passes = self._open_passes()

        def compare() -> str:
            fault = find_fault(CachedDenoiser(passes, 0, block=block))
            said = (
                f"the model does not follow a 4-D mask of blocks of {block} of form "
                f"{passes.form!r} (it gives {fault})"
            )
            return said if fault else ""

        return self._checked((block, passes.dtype), compare)

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
