"""A call of `LLaDA2Pipeline`, decoded by a canvas policy over the model's own block mask.

Rows stand for themselves: their blocks and positions count from their own first token, where the
pipeline counts from the first column of the batch, padding included. For rows without padding the
two are the same.

A block-causal model that takes 4-D masks and keeps its keys and values, as a `Denoiser`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass, CanvasProgress, OnCanvasStep
from mmaccel.contracts import Layout, Prompt
from mmaccel.errors import OptionError, ShapeError
from mmaccel.pipelines.attach.pipeline_call import draw_seed
from mmaccel.pipelines.diffusion_lm.llada2.call import BlockCall
from mmaccel.pipelines.diffusion_lm.llada2.key_store import StoredCalls
from mmaccel.pipelines.diffusion_lm.selected_logits import gather_rows
from mmaccel.results import Stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams


class BlockDenoiser:
    """Passes of a canvas through a model that `block_trial.check_block_mask` found to follow masks.

    Args:
        calls: of the model, with the form of mask it takes.
        vocab_size, mask_token, block, device: see `mmaccel.canvas_contracts.Denoiser`.
        max_positions: positions the model was made for, or None.
    """

    supports_kv_cache = is_self_checked = True

    def __init__(
        self,
        calls: StoredCalls,
        vocab_size: int,
        mask_token: int,
        block: int,
        device: torch.device,
        max_positions: int | None = None,
    ) -> None:
        self._calls, self.max_positions = calls, max_positions
        self.vocab_size, self.mask_token, self.block = vocab_size, mask_token, block
        self.device = device
        self._rows = self._places = 0

    def reserve(self, rows: int, cache_size: int) -> None:
        """Make room; see `mmaccel.canvas_contracts.Denoiser.reserve`."""
        self._rows, self._places = rows, cache_size
        self._calls.reserve(rows, cache_size)

    def forward(self, entries: CanvasPass) -> Tensor:
        """One pass; see `mmaccel.canvas_contracts.Denoiser.forward`.

        Raises:
            ShapeError: more rows or other places than reserved.
            OptionError: a position beyond what the model was made for.
        """
        rows, places = entries.tokens.shape[0], entries.reads.shape[-1]
        if rows > self._rows or places > self._places:
            raise ShapeError(
                f"pass: expected at most {self._rows} rows of {self._places} places, received "
                f"{rows} of {places}; call reserve(rows, cache_size)"
            )
        most = self.max_positions
        if most is not None and places > most and int(entries.positions.max()) >= most:
            raise OptionError(
                f"positions: expected at most {most}, which the model was made "
                "for, received more; ask for fewer tokens"
            )
        logits = self._calls.run(
            entries.tokens, entries.positions, entries.cache_indices, entries.reads
        )
        return gather_rows(logits, entries.queries)


REFERENCE = "one commit a pass over the model's own 4-D block mask"


@torch.no_grad()
def decode(
    pipe: Any,
    policy: Any,
    call: BlockCall,
    calls: StoredCalls,
    seed: int | Sequence[int] | None,
    layout: Layout | None,
) -> tuple[Any, Stats]:
    """Make what the pipeline would have returned.

    Args:
        pipe: the pipeline, for its tokenizer and its checks.
        policy: a canvas policy.
        call: what it was called with.
        calls: of its model.
        seed: of the noise; None draws one from the call's `generator`.
        layout: what is known about the slots.

    Raises:
        ValueError: from the pipeline's own checks.
        CanvasInterrupt, OptionError, ShapeError, NumericsError: of a canvas run.
    """
    given = call.arguments
    tensors = list(call.callback_tensors)
    checked = dict(given) | {"block_length": call.block}
    checked["callback_on_step_end_tensor_inputs"] = tensors
    names = inspect.signature(pipe.check_inputs).parameters
    pipe.check_inputs(**{name: checked[name] for name in names})
    wanted = ("prompt", "messages", "input_ids", "attention_mask", "use_chat_template")
    ids, visible = pipe._prepare_input_ids(
        **{name: given[name] for name in (*wanted, "add_generation_prompt")},
        chat_template_kwargs=None,
    )
    ids, visible = ids.to(calls.device), visible.to(calls.device).bool()
    order = (~visible).int().argsort(dim=1, stable=True)  # visible tokens first
    stops = torch.tensor([call.end_token], device=ids.device) if call.stops else None
    prompt = Prompt(ids.gather(1, order), visible.sum(1), stop_tokens=stops, layout=layout)
    params = read_params(given)
    if seed is None:
        seed = draw_seed(given["generator"]) if params.temperature > 0 else 0
    text = calls.config
    most = getattr(text, "max_position_embeddings", None)
    model = BlockDenoiser(calls, text.vocab_size, call.mask_token, call.block, calls.device, most)
    on_step = _tell(pipe, given["callback_on_step_end"], ids, call.mask_token)
    noise = Noise.from_seed(seed, prompt.batch, ids.device)
    made = policy.sample(model, prompt, call.length, params=params, noise=noise, on_step=on_step)
    slots = torch.arange(call.length, device=ids.device)
    sequences = torch.where(slots < made.lengths[:, None], made.tokens, call.mask_token)
    made.stats.reference = REFERENCE
    return _hand_over(pipe, call, sequences), made.stats


def read_params(given: Any) -> SamplingParams:
    """The filters that the pipeline's sampling arguments mean."""
    temperature, method = given["temperature"], given["sampling_method"]
    top_k, top_p = given["top_k"], given["top_p"]
    return SamplingParams(
        temperature=0.0 if method == "greedy" else temperature,
        top_k=None if top_k is None or top_k <= 0 else top_k,
        top_p=None if top_p is None or top_p >= 1 else top_p,
    )


def _tell(pipe: Any, callback: Any, prompt: Tensor, mask_token: int) -> OnCanvasStep | None:
    """The pipeline's step callback, told after every pass."""
    if callback is None:
        return None

    def on_step(progress: CanvasProgress) -> None:
        made = torch.where(progress.is_committed, progress.tokens, mask_token)
        line = torch.cat([prompt, made], 1)
        step = progress.passes - 1
        back = callback(pipe, step, step, {"block_x": line.clone()})
        changed = back.get("block_x") if isinstance(back, dict) else None
        if changed is not None and not torch.equal(changed, line):
            raise OptionError(
                "callback: expected block_x as it was given, received another one; a canvas policy "
                "cannot take tokens from outside, use CachedBlocks() or layout="
            )

    return on_step


def _hand_over(pipe: Any, call: BlockCall, sequences: Any) -> Any:
    """Sequences `[B, L]` int64 as the pipeline returns them."""
    from diffusers.pipelines.llada2.pipeline_llada2 import LLaDA2PipelineOutput

    texts = None
    if call.arguments["output_type"] == "text" and pipe.tokenizer is not None:
        rows = [row[:end] for row, end in zip(sequences, call.ends(sequences).tolist())]
        texts = pipe.tokenizer.batch_decode(rows, skip_special_tokens=True)
    if not call.arguments["return_dict"]:
        return sequences, texts
    return LLaDA2PipelineOutput(sequences=sequences, texts=texts)
