"""diffusers' `LLaDA2Pipeline` under a policy.

`CachedBlocks` keeps the pipeline's decoder and serves the model's calls. A canvas policy replaces
the decoder, over the model's own block mask; blocks and positions then count from a row's own first
token, where the pipeline counts padding, too.

Source: `diffusers.pipelines.llada2`, diffusers 0.42.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import LAYER_METHODS, NOT_OF_CANVASES, Prompt
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.attach.service import Methods
from mmaccel.pipelines.hosts.diffusion_lm.arguments import pipeline_table, read_schedule
from mmaccel.pipelines.hosts.diffusion_lm.cached import CachedDenoiser
from mmaccel.pipelines.hosts.diffusion_lm.llada2.block_cache import (
    BlockCache,
    BlockCall,
    CachedBlocks,
)
from mmaccel.pipelines.hosts.diffusion_lm.llada2.block_masks import BlockMasks, find_masks
from mmaccel.pipelines.hosts.diffusion_lm.pipeline_service import (
    PolicyService,
    callback_tensors,
    check_inputs,
    make_output,
)
from mmaccel.pipelines.hosts.diffusion_lm.self_check import find_fault
from mmaccel.pipelines.hosts.generate_call import align_left, bind_call
from mmaccel.pipelines.hosts.original_methods import original
from mmaccel.pipelines.hosts.step_callback import call_back
from mmaccel.policies import CanvasInterrupt, CanvasProgress
from mmaccel.results import Generation, Stats
from mmaccel.samplers.arithmetic import PassFormats, own_arithmetic
from mmaccel.samplers.compare_logits import Tolerance, same_logits
from mmaccel.samplers.noise import Noise, draw_seed
from mmaccel.samplers.sampling_params import SamplingParams

ARGUMENTS = pipeline_table(
    "prompt messages input_ids attention_mask use_chat_template add_generation_prompt gen_length "
    "block_length num_inference_steps temperature top_p top_k sampling_method eos_early_stop "
    "eos_token_id mask_token_id generator output_type return_dict callback_on_step_end "
    "callback_on_step_end_tensor_inputs",
    refused=("threshold", "editing_threshold", "max_post_steps", "minimal_topk"),
)

REFERENCE = "one commit a pass over the model's own 4-D block mask"
# tensors that a canvas policy can hand to `callback_on_step_end`; the others are of the scheduler
_CALLBACK_TENSORS = ("block_x",)
_PROMPT = (
    "prompt", "messages", "input_ids", "attention_mask", "use_chat_template",
    "add_generation_prompt",
)  # fmt: skip


class LLaDA2Denoiser(CachedDenoiser):
    """The pipeline's model, under masks of the form that is declared of its class."""

    reports_past_only = True

    def __init__(self, model: Any, mask_token: int, block: int, form: str) -> None:
        super().__init__(model, mask_token, block=block)
        self.form = form


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
        block = self.target.scheduler.config.block_length
        return self._undeclared or self._open_model(block).lack(word, part)

    def methods(self) -> list[tuple[Any, Methods]]:
        of_pipe: Methods = {
            "__call__": self._pipe_call,
            "_prepare_input_ids": self._prepare_input_ids,
        }
        return [(self._model, {"__call__": self._model_call}), (self.target, of_pipe)]

    def _model_call(self, model: Any, *args: Any, **options: Any) -> Any:
        call = self.call
        if call is None or not call.is_served:
            return self._own(*args, **options)
        call.is_served = False  # passes and self-checks call the model itself
        try:
            return call.run(*args, **options)
        finally:
            call.is_served = True

    def _own(self, *args: Any, **options: Any) -> Any:
        return original(self._model, "__call__")(*args, **options)

    def _prepare_input_ids(self, pipe: Any, **options: Any) -> tuple[Tensor, Tensor]:
        ids, mask = original(pipe, "_prepare_input_ids")(**options)
        if self.call is not None:
            mask_token = self.call.mask_token
            is_open = ((ids == mask_token) & mask.to(ids.device).bool()).view(-1, ids.shape[-1])
            if bool(is_open.any()):  # the pipeline would fill it in one block, and leave others
                raise OptionError(
                    f"prompt: expected no mask token, received id {mask_token} in row "
                    f"{int(is_open.any(1).nonzero()[0])}; leave the open slots to gen_length"
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
                out, stats = self._run_cached(run, call, "blocks", self._check_mask)
            else:
                out, stats = self._run_cached(run, call, self._masks.reading, self._check_call)
        stats.seconds = time.perf_counter() - began
        self.record(stats)
        return out

    def _run_cached(
        self,
        run: Callable[[], Any],
        call: BlockCall,
        reading: str | None,
        check: Callable[[int, bool], str],
    ) -> tuple[Any, Stats]:
        """The pipeline's own decoder, whose calls of the model are served."""
        model = self._open_model(call.block)
        call.own, call.check = self._own, partial(check, call.block)
        if reading is not None:
            call.cache = BlockCache(model, reading, call.block, call.length)
        call.formats, call.is_served = PassFormats(model), True
        try:
            out = run()
        except KeyboardInterrupt as stop:
            if call.tokens is None:
                raise
            tokens, is_committed = call.canvas(call.tokens)
            stats = call.report(self.policy, tokens)
            stats.tokens = int(is_committed.sum())
            passes = torch.full_like(tokens[:, 0], stats.passes)
            generation = Generation(tokens, is_committed.sum(1), passes, stats)
            raise CanvasInterrupt(generation, is_committed) from stop
        return out, call.report(self.policy, out[0])

    def _run_canvas(self, run: Callable[[], Any], call: BlockCall) -> tuple[Any, Stats]:
        """The call decoded by the canvas policy, or as it is where the policy cannot."""
        from diffusers.pipelines.llada2.pipeline_llada2 import LLaDA2PipelineOutput

        pipe, given = self.target, call.arguments
        callback = given["callback_on_step_end"]
        names = callback_tensors(given, _CALLBACK_TENSORS)
        beyond = [name for name in names if name not in _CALLBACK_TENSORS]
        reason = ""
        if callback is not None and beyond:
            reason = f"a callback that asks for {', '.join(beyond)} of the pipeline's own scheduler"
        reason = self._refuse(reason) or self._check_mask(call.block)
        if reason:
            return self._run_cached(run, call, None, lambda *_: reason)
        policy = read_schedule(ARGUMENTS, call.asked, self.policy)
        model = self._open_model(call.block, call.mask_token)
        model.use_methods(self.layer_methods)
        checked = {"block_length": call.block, "callback_on_step_end_tensor_inputs": names}
        check_inputs(pipe, {**given, **checked})
        asked = {name: given[name] for name in _PROMPT}
        ids, visible = pipe._prepare_input_ids(**asked, chat_template_kwargs=None)
        ids, visible = ids.to(model.device), visible.to(model.device).bool()
        ends = given["eos_early_stop"] and call.end_token >= 0
        prompt = Prompt(
            align_left(ids, visible),
            visible.sum(1),
            stop_tokens=ids.new_tensor([call.end_token]) if ends else None,
            layout=self.layout,
        )
        params = read_params(given)
        seed = self.seed
        if seed is None and params.temperature > 0:
            seed = draw_seed(given["generator"])

        def on_step(progress: CanvasProgress) -> None:
            canvas = torch.where(progress.is_committed, progress.tokens, call.mask_token)
            tokens = {"block_x": torch.cat([ids, canvas], 1)}
            step = progress.passes - 1
            call_back(callback, pipe, step, step, tokens, remedy="use CachedBlocks() or layout=")

        with torch.no_grad():
            generation = policy.sample(
                model,
                prompt,
                call.length,
                params=params,
                noise=Noise.from_seed(0 if seed is None else seed, prompt.batch, ids.device),
                on_step=None if callback is None else on_step,
            )
        slots = torch.arange(call.length, device=ids.device)
        is_row = slots < generation.lengths[:, None]
        sequences = torch.where(is_row, generation.tokens, call.mask_token)
        stats = generation.stats
        stats.reference, stats.seed = REFERENCE, seed
        self.layer_methods.record(stats, model)
        return make_output(
            LLaDA2PipelineOutput, pipe.tokenizer, sequences, call.end_token, given
        ), stats

    def _open_model(self, block: int, mask_token: int = 0) -> LLaDA2Denoiser:
        """A new one with its own cache: a self-check may run in the middle of a call."""
        return LLaDA2Denoiser(self._model, mask_token, block, self._masks.form)

    def _checked(self, key: tuple[Any, ...], compare: Callable[[], str]) -> str:
        """Why nothing can be cached, by a self-check that runs once for each key."""
        if not self._undeclared and key not in self._reasons:
            self._reasons[key] = compare()
        return self._refuse(self._undeclared or self._reasons[key])

    def _check_call(self, block: int, is_padded: bool) -> str:
        """Why nothing can be cached of the pipeline's own call, with its 2-D mask.

        Three random blocks in one call, and then as one and two more over its cached keys.
        """
        model, reading = self._open_model(block), self._masks.reading
        n = 3 * block

        def compare() -> str:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(model.vocab_size, (2, n), generator=generator, device="cpu")
            visible = torch.ones_like(ids)
            if is_padded:
                # row 0 like a prompt, row 1 as behind the last token; models may run other code
                visible[0, : block + 1] = 0
                visible[1, n - (block + 1) // 2 :] = 0
            ids, visible = ids.to(model.device), visible.to(model.device)
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
                cache = BlockCache(model, reading, block, 0)
                first = cache.run(ids[:, :block], visible[:, :block], columns[:, :block])
                rest = cache.run(ids, visible, columns)
                return [torch.cat([first, rest], 1)]

            tolerance = Tolerance.strict(model.dtype)
            difference = same_logits(lambda: [own], run_cached, tolerance, where=visible.bool())
            if not difference:
                return ""
            return (
                f"{'padded' if is_padded else 'unpadded'} passes over cached blocks of {block} do "
                f"not give the logits of the model's own call but {difference} where its 2-D mask "
                f"is read as {reading!r}"
            )

        return self._checked((block, is_padded, model.dtype), compare)

    def _check_mask(self, block: int, is_padded: bool = False) -> str:
        """Why the model cannot be run under 4-D block masks, with padding or without."""
        model = self._open_model(block)

        def compare() -> str:
            fault = find_fault(model)
            if not fault:
                return ""
            return (
                f"the model does not follow a 4-D mask of blocks of {block} of form "
                f"{model.form!r} (it gives {fault})"
            )

        return self._checked((block, model.dtype), compare)

    def _refuse(self, reason: str) -> str:
        """The reason itself; with `strict`, an error where there is one."""
        if reason and self.strict:
            raise UnsupportedModelError(
                f"pipeline: expected a call that {type(self.policy).__name__} can serve, received "
                f"one where {reason}; attach with strict=False to run it without"
            )
        return reason

    def _own_logits(self, ids: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
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


def read_params(given: Any) -> SamplingParams:
    temperature, method = given["temperature"], given["sampling_method"]
    top_k, top_p = given["top_k"], given["top_p"]
    return SamplingParams(
        temperature=0.0 if method == "greedy" else temperature,
        top_k=None if top_k is None or top_k <= 0 else top_k,
        top_p=None if top_p is None or top_p >= 1 else top_p,
    )
