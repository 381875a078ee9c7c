"""A call of `LLaDA2Pipeline`, decoded by a canvas policy over the model's own block mask.

The blocks and positions of a row count from its own first token. The pipeline counts from the first
column of the batch, padding included; for rows without padding the two are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, CanvasProgress, Denoiser, Layout, OnCanvasStep, Prompt
from mmaccel.errors import OptionError, ShapeError
from mmaccel.pipelines.attach.pipeline_call import draw_seed
from mmaccel.pipelines.diffusion_lm.llada2.call import BlockCall
from mmaccel.pipelines.diffusion_lm.llada2.kv_cache import CachedModel
from mmaccel.pipelines.diffusion_lm.pipeline_service import check_inputs, decode_texts
from mmaccel.pipelines.diffusion_lm.selected_logits import gather_rows
from mmaccel.pipelines.step_callback import call_back, refuse_interrupt
from mmaccel.results import Stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams


class BlockDenoiser(Denoiser):
    """A model that passed `check_block_mask`, as a `Denoiser`.

    Args:
        model: takes 4-D masks and has a KV cache.
        mask_token, block: see `mmaccel.contracts.Denoiser`.
    """

    supports_kv_cache = True
    is_self_checked = True

    def __init__(self, model: CachedModel, mask_token: int, block: int) -> None:
        self._model, self.mask_token, self.block = model, mask_token, block
        self.vocab_size: int = model.config.vocab_size
        self.max_positions = getattr(model.config, "max_position_embeddings", None)
        self._rows = self._cache_size = 0

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens."""
        return self._model.device

    def reserve(self, rows: int, cache_size: int) -> None:
        """See `Denoiser.reserve`."""
        self._rows, self._cache_size = rows, cache_size
        self._model.reserve(rows, cache_size)

    def forward(self, entries: CanvasPass) -> Tensor:
        """One pass; see `Denoiser.forward`.

        Raises:
            ShapeError: more rows or a larger cache than reserved.
            OptionError: a position beyond `max_positions`.
        """
        rows, cache_size = entries.tokens.shape[0], entries.reads.shape[-1]
        if rows > self._rows or cache_size > self._cache_size:
            raise ShapeError(
                f"pass: expected at most {self._rows} rows of {self._cache_size} cache indices, "
                f"received {rows} of {cache_size}; call reserve first"
            )
        limit = self.max_positions
        if limit is not None and cache_size > limit and int(entries.positions.max()) >= limit:
            raise OptionError(
                f"positions: expected at most {limit} (the model's max_position_embeddings), "
                "received more; ask for fewer tokens"
            )
        logits = self._model.run(
            entries.tokens, entries.positions, entries.cache_indices, entries.reads
        )
        return gather_rows(logits, entries.queries)


REFERENCE = "one commit a pass over the model's own 4-D block mask"


@torch.no_grad()
def decode(
    pipe: Any,
    policy: Any,
    call: BlockCall,
    cached: CachedModel,
    seed: int | Sequence[int] | None,
    layout: Layout | None,
) -> tuple[Any, Stats]:
    """Decode a call by a canvas policy.

    Args:
        pipe: the pipeline, for its tokenizer and its checks.
        policy: a canvas policy.
        call: the pipeline's call.
        cached: the pipeline's model.
        seed: of the noise; None draws one from the call's `generator`.
        layout: of the slots.

    Returns:
        The pipeline's output, and the statistics.

    Raises:
        ValueError: from the pipeline's own checks.
        CanvasInterrupt, OptionError, ShapeError, NumericsError: of a canvas run.
    """
    given = call.arguments
    checked = {"block_length": call.block}
    checked["callback_on_step_end_tensor_inputs"] = call.callback_tensors
    check_inputs(pipe, {**given, **checked})
    wanted = ("prompt", "messages", "input_ids", "attention_mask", "use_chat_template")
    ids, visible = pipe._prepare_input_ids(
        **{name: given[name] for name in (*wanted, "add_generation_prompt")},
        chat_template_kwargs=None,
    )
    ids, visible = ids.to(cached.device), visible.to(cached.device).bool()
    order = (~visible).int().argsort(dim=1, stable=True)  # visible tokens first
    stops = torch.tensor([call.end_token], device=ids.device) if call.stops else None
    prompt = Prompt(ids.gather(1, order), visible.sum(1), stop_tokens=stops, layout=layout)
    params = read_params(given)
    if seed is None and params.temperature > 0:
        seed = draw_seed(given["generator"])
    model = BlockDenoiser(cached, call.mask_token, call.block)
    on_step = _make_on_step(pipe, given["callback_on_step_end"], ids, call)
    noise = Noise.from_seed(0 if seed is None else seed, prompt.batch, ids.device)
    generation = policy.sample(
        model, prompt, call.length, params=params, noise=noise, on_step=on_step
    )
    slots = torch.arange(call.length, device=ids.device)
    sequences = torch.where(slots < generation.lengths[:, None], generation.tokens, call.mask_token)
    generation.stats.reference, generation.stats.seed = REFERENCE, seed
    return _make_output(pipe, call, sequences), generation.stats


def read_params(given: Any) -> SamplingParams:
    """The pipeline's sampling arguments as `SamplingParams`."""
    temperature, method = given["temperature"], given["sampling_method"]
    top_k, top_p = given["top_k"], given["top_p"]
    return SamplingParams(
        temperature=0.0 if method == "greedy" else temperature,
        top_k=None if top_k is None or top_k <= 0 else top_k,
        top_p=None if top_p is None or top_p >= 1 else top_p,
    )


def _make_on_step(pipe: Any, callback: Any, prompt: Tensor, call: BlockCall) -> OnCanvasStep | None:
    """The pipeline's step callback, called after every pass."""
    if callback is None:
        return None

    def on_step(progress: CanvasProgress) -> None:
        canvas = torch.where(progress.is_committed, progress.tokens, call.mask_token)
        tokens = {"block_x": torch.cat([prompt, canvas], 1)}
        step = progress.passes - 1
        call_back(callback, pipe, step, step, tokens, remedy="use CachedBlocks() or layout=")
        refuse_interrupt(pipe)

    return on_step


def _make_output(pipe: Any, call: BlockCall, sequences: Any) -> Any:
    """Sequences `[B, L]` int64 as the pipeline returns them."""
    from diffusers.pipelines.llada2.pipeline_llada2 import LLaDA2PipelineOutput

    is_text = call.arguments["output_type"] == "text" and pipe.tokenizer is not None
    texts = decode_texts(pipe.tokenizer, sequences, call.end_token) if is_text else None
    if not call.arguments["return_dict"]:
        return sequences, texts
    return LLaDA2PipelineOutput(sequences=sequences, texts=texts)
