"""A call of a denoiser's `generate`, read once: the canvas behind each prompt.

Departures from transformers: a temperature without `do_sample` decides alone, as in the published
loops of these models; no default length is assumed; without an `attention_mask` every token counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import ANY_INT, check_answer, check_int
from mmaccel.contracts import Denoiser, Layout, Prompt
from mmaccel.errors import OptionError, ShapeError
from mmaccel.pipelines.hosts.generate_call import Task, hand_over, join_branches
from mmaccel.samplers.sampling_params import SamplingParams


def read_canvas(
    given: Mapping[str, Any], config: Any, denoiser: Denoiser, layout: Layout | None
) -> Task:
    """A denoiser's call, as a canvas to fill behind each prompt.

    What it does not name (None in `given`) is of its `GenerationConfig`, then of the model's own;
    end and padding tokens also of the model's configuration.
    """
    defaults = (config, getattr(denoiser.model, "generation_config", None))
    levels = [given, *(vars(level) if hasattr(level, "__dict__") else {} for level in defaults)]

    def find(name: str, default: Any = None) -> Any:
        return next((level[name] for level in levels if level.get(name) is not None), default)

    model_config = getattr(denoiser.model, "config", None)
    ends = _as_ids(find("eos_token_id", getattr(model_config, "eos_token_id", None)))
    fillers = [*_as_ids(find("pad_token_id", getattr(model_config, "pad_token_id", None))), *ends]
    filler = torch.tensor(fillers[0], device="cpu", dtype=torch.int64) if fillers else None
    as_output = bool(find("return_dict_in_generate"))
    mask_token = denoiser.mask_token  # in the model's own numbering, as ids of calls are
    if mask_token is not None and hasattr(denoiser, "to_model"):
        of_canvases = torch.tensor(mask_token, device="cpu", dtype=torch.int64)
        mask_token = int(denoiser.to_model(of_canvases))
    if mask_token in ends:
        raise OptionError(
            f"eos_token_id: expected ids that end a row, received {mask_token}, the mask "
            "token, which is never drawn; take the tokenizer's, or -1 where nothing ends rows"
        )
    n_ids = getattr(denoiser, "n_ids", None)
    masked = -1 if mask_token is None else mask_token
    ids = given["input_ids"]
    branches = [_read_rows(given, "input_ids", "attention_mask", n_ids, masked)]
    scale = 1.0 if given["guidance_scale"] is None else given["guidance_scale"]
    is_guided = given["negative_prompt_ids"] is not None
    if is_guided != (scale != 1):
        raise OptionError(
            "guidance_scale: expected one other than 1 with negative_prompt_ids, and none without "
            f"them, received {scale!r} and {'some' if is_guided else 'none'}; give both, such as "
            "guidance_scale=3.5, or neither"
        )
    if is_guided:
        tokens, mask = _read_rows(
            given, "negative_prompt_ids", "negative_prompt_attention_mask", n_ids, masked
        )
        if len(tokens) not in (1, len(ids)):
            raise ShapeError(
                f"negative_prompt_ids: expected {len(ids)} rows or one for all, received "
                f"{len(tokens)}; give one for each row of input_ids"
            )
        branches.append((tokens.expand(len(ids), -1), mask.expand(len(ids), -1)))
    tokens, lengths = join_branches(branches, denoiser.device)
    stops = tokens.new_tensor(ends)
    if hasattr(denoiser, "to_canvas"):
        tokens, stops = denoiser.to_canvas(tokens), denoiser.to_canvas(stops)
    temperature = _read_temperature(levels, find("temperature"))
    cuts = {"top_k": find("top_k") or None, "top_p": find("top_p"), "min_p": find("min_p")}
    params = SamplingParams(temperature=temperature or 1.0, guidance_scale=scale, **cuts)
    if not temperature:  # without cuts, which were checked above
        params = SamplingParams(temperature=0.0, guidance_scale=scale)
    names = ("gen_length", "max_new_tokens", "max_length")
    if None not in (given["gen_length"], given["max_new_tokens"]):
        raise OptionError(
            f"gen_length: expected it or max_new_tokens, received {given['gen_length']!r} and "
            f"{given['max_new_tokens']!r}; leave one out"
        )
    name, length = "max_new_tokens", None
    for level in levels:
        asked = [each for each in names if level.get(each) is not None]
        if asked:
            name, length = asked[0], level[asked[0]]
            break
    before = ids.shape[1] if name == "max_length" else 0
    hint = "a canvas has a length from the start, give one such as max_new_tokens=128"
    check_int(name, length, before + 1, hint=hint)
    assert length is not None
    return Task(
        prompt=Prompt(
            tokens,
            lengths,
            branches=len(branches),
            stop_tokens=stops if ends else None,
            layout=layout,
        ),
        length=length - before,
        params=params,
        samples=bool(temperature),
        hand_over=lambda generation: hand_over(ids, generation, filler, as_output),
    )


def _read_rows(
    given: Mapping[str, Any], name: str, mask_name: str, n_ids: int | None, mask_token: int
) -> tuple[Tensor, Tensor]:
    """Ids `[B, T]` int64 of a call and their mask (True on tokens), padded on any side.

    No prompt may hold the mask token, or -1; padding may be any number.
    """
    ids, mask = given[name], given[mask_name]
    is_matrix = isinstance(ids, Tensor) and ids.ndim == 2 and ids.numel() > 0
    if not is_matrix or ids.is_floating_point() or ids.dtype == torch.bool:
        shown = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
        raise ShapeError(
            f"{name}: expected int64 [B, T] with a token in it, received {shown}; "
            "take the tokenizer's input_ids"
        )
    mask = torch.ones_like(ids) if mask is None else mask
    hint = "take the one of the tokenizer, 1 on tokens and 0 on padding"
    check_answer(mask_name, mask, ids.shape, "", hint, within=(0, 1))
    ids, mask = ids.to(torch.int64), mask.to(ids.device).bool()
    is_empty = ~mask.any(1)
    if bool(is_empty.any()):
        raise ShapeError(
            f"{name}: expected at least one token in every row, received padding alone in "
            f"row {int(is_empty.nonzero()[0])} by {mask_name}; begin it with a token"
        )
    last = ANY_INT if n_ids is None else n_ids - 1
    hint = "take those of the model's own tokenizer"
    check_answer(name, ids[mask], (int(mask.sum()),), "int64", hint, within=(0, last))
    for row, column in (ids == mask_token).logical_and(mask).nonzero().tolist():
        raise OptionError(
            f"{name}: expected no mask token, received id {ids[row, column]} in row {row}; leave "
            "open slots to the canvas, and give known ones by a layout"
        )
    return ids, mask


def _read_temperature(levels: Sequence[Mapping[str, Any]], default: Any) -> Any:
    """Of the first level that says whether tokens are drawn, or how; `default` is any level's."""
    for level in levels:
        samples, asked = level.get("do_sample"), level.get("temperature")
        if samples is None and asked is None:
            continue
        if samples is not None and not samples:
            return 0.0
        return (default or 1.0) if asked is None else asked
    return 0.0


def _as_ids(ids: Any) -> list[int]:
    """The ids from 0 on of one id, several, a tensor or None."""
    if ids is None:
        return []
    ids = list(ids) if isinstance(ids, set) else ids
    return [int(each) for each in torch.as_tensor(ids, device="cpu").flatten() if each >= 0]
