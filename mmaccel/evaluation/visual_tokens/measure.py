"""Answers to the same questions by every side, batch by batch, and what each cost.

A round is one batch of questions, answered by all sides one after the other; from round to round
the sides change places, so that a machine that slows down slows all. What a side has answered is
kept as a record of lists, one entry a round, ready for JSON: a run that was stopped goes on with
the first round that a side lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.evaluation.speed.measure import order_of, synchronise_for
from mmaccel.evaluation.visual_tokens.methods import Side
from mmaccel.evaluation.visual_tokens.prefill import PromptCost, watch_prompt
from mmaccel.evaluation.visual_tokens.questions import ImageQuestion, VisionModel, is_right
from mmaccel.handle import attach
from mmaccel.pipelines.vision_language.visuals import find_placeholder

Record = dict[str, Any]
"""What a side did: `right`, a character for each question, "1" where its answer was right; and
lists with a number a round: `seconds`, `encoder_seconds` and `prefill_seconds` of the batch;
`visual_tokens`, `layer_tokens` and `flops`, means over its questions: visual tokens after the last
layer, mean over layers, operations of the prompt. `sessions` has the run that measured the round.
"""
PER_ROUND = (
    "seconds",
    "encoder_seconds",
    "prefill_seconds",
    "visual_tokens",
    "layer_tokens",
    "flops",
    "sessions",
)


def new_record() -> Record:
    """A record of nothing."""
    return {"right": "", **{name: [] for name in PER_ROUND}}


def count_rounds(questions: Sequence[ImageQuestion], batch: int) -> int:
    """Rounds in all."""
    return -(-len(questions) // batch)


def measure_sides(
    vlm: VisionModel,
    questions: Sequence[ImageQuestion],
    sides: Sequence[Side],
    records: dict[str, Record],
    *,
    batch: int,
    max_new_tokens: int,
    seed: int,
    session: int,
) -> Iterator[str]:
    """Fill the records, round by round; yields the key of the side that has answered a batch.

    Args:
        vlm: the model.
        questions: all of them.
        sides: who answers.
        records: by the sides' keys; changed.
        batch: questions answered together.
        max_new_tokens: of an answer.
        seed: question k has seed + k, for methods that draw.
        session: number of this run, for the records.
    """
    synchronise = synchronise_for(str(vlm.model.device))
    by_key = {side.key: side for side in sides}
    is_warm = False
    for index in range(count_rounds(questions, batch)):
        order = order_of(list(by_key), index)
        wanted = [by_key[key] for key in order if len(records[key]["seconds"]) <= index]
        if not wanted:
            continue
        first = index * batch
        asked = questions[first : first + batch]
        inputs = vlm.encode(asked)
        seeds = [seed + first + k for k in range(len(asked))]
        options: dict[str, Any] = {"seeds": seeds, "max_new_tokens": max_new_tokens}
        if not is_warm:
            answer(vlm, inputs, wanted[0].method, synchronise=synchronise, **options)
            is_warm = True
        for side in wanted:
            texts, cost = answer(vlm, inputs, side.method, synchronise=synchronise, **options)
            _note(records[side.key], vlm.model, inputs, texts, cost, asked, session)
            yield side.key


def answer(
    vlm: VisionModel,
    inputs: dict[str, Any],
    method: Any,
    *,
    seeds: Sequence[int],
    max_new_tokens: int,
    synchronise: Callable[[], object] = lambda: None,
) -> tuple[list[str], PromptCost]:
    """Greedy answers to a batch of R questions, token by token, and what they cost.

    Args:
        vlm: the model.
        inputs: of `VisionModel.encode`.
        method: a reducer, or None.
        seeds: one for each question.
        max_new_tokens: of an answer.
        synchronise: waits for the device.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    with attach(
        vlm.model,
        "autoregressive",
        strict=True,
        seed=list(seeds),
        visual_tokens=method,
        cuda_graphs=False,
    ):
        with watch_prompt(vlm.model, synchronise) as cost, torch.no_grad():
            ids = vlm.model.generate(**inputs, **options)
    return vlm.decode(ids[:, inputs["input_ids"].shape[1] :]), cost


def count_visual(model: Any, inputs: dict[str, Any], columns: Tensor) -> Tensor:
    """Visual tokens in each layer, `[R, L]`, of prompts that have `columns` `[R, L]` there: those
    columns that are no text. Tokens that end an image's rows count as visual.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    text = mask & (ids != find_placeholder(model, "image"))
    return columns - text.sum(1, keepdim=True).cpu()


def _note(
    record: Record,
    model: Any,
    inputs: dict[str, Any],
    texts: Sequence[str],
    cost: PromptCost,
    asked: Sequence[ImageQuestion],
    session: int,
) -> None:
    tokens = count_visual(model, inputs, cost.columns).double()
    entry = {
        "seconds": round(cost.seconds, 5),
        "encoder_seconds": round(cost.encoder_seconds, 5),
        "prefill_seconds": round(cost.prefill_seconds, 5),
        "visual_tokens": round(float(tokens[:, -1].mean()), 3),
        "layer_tokens": round(float(tokens.mean()), 3),
        "flops": float(cost.flops.mean()),
        "sessions": session,
    }
    right = "".join("01"[is_right(text, q)] for text, q in zip(texts, asked, strict=True))
    record["right"] += right
    for name, value in entry.items():
        record[name].append(value)
