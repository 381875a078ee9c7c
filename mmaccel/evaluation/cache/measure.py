"""Answers to the same questions by every side, batch by batch, and what each cost.

A round is one batch of questions, answered by all sides one after the other; from round to round
the sides change places, so that a machine that slows down slows all. What a side has answered is
kept as a record of lists, one entry a round, ready for JSON: a run that was stopped goes on with
the first round that a side lacks.

Questions are answered by the passes that `mmaccel.attach` makes, token by token: the prompt, after
which entries are evicted, then one token a pass. The prompts of a round are
processed once for all sides (`SharedPrompts`), but for those that choose what a prompt's queries
see.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmaccel.contracts import Pass
from mmaccel.evaluation.cache.documents import TextModel
from mmaccel.evaluation.cache.methods import Side
from mmaccel.evaluation.cache.prompts import SharedPrompts, find_pass, share_prompts
from mmaccel.evaluation.cache.questions import TextQuestion
from mmaccel.evaluation.speed.measure import order_of, synchronise_for
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.layers.methods import LayerMethods, reducing

Record = dict[str, Any]
"""What a side did: `right`, a character for each question, "1" where its answer was right; and
lists with a number a round: `seconds` and `prefill_seconds` of the batch, `pass_seconds`, the
median of its passes of one token; `kept`, `bytes` and `blocks`, see `Cost`. `answers` has the texts
of the round, `sessions` the run that measured it.
"""
ADDED = ("blocks", "answers")  # which the records of earlier releases lack
PER_ROUND = ("seconds", "prefill_seconds", "pass_seconds", "kept", "bytes", "sessions", *ADDED)


@dataclass
class Cost:
    """What the answers to R questions cost.

    Attributes:
        prefill_seconds: of the prompts' pass and the eviction.
        shared_seconds: what of it is the time of a pass that sides share.
        pass_seconds: of each pass of one token; the first one is left out, which allocates.
        kept: cached entries of a prompt that stayed, of those that there were, mean over layers.
        bytes: of keys and values of one row in all layers, as they are allocated.
        blocks: blocks that were read, of those that there were, over all layers and passes, or over
            the prompt's for a method that chooses there; None where no method chooses blocks.
    """

    prefill_seconds: float = 0.0
    shared_seconds: float = 0.0
    pass_seconds: list[float] = field(default_factory=list)
    kept: float = 1.0
    bytes: float = 0.0
    blocks: float | None = None


def new_record() -> Record:
    """A record of nothing."""
    return {"right": "", **{name: [] for name in PER_ROUND}}


def count_rounds(n_questions: int, batch: int) -> int:
    """Rounds in all."""
    return -(-n_questions // batch)


def measure_sides(
    text_model: TextModel,
    questions: Sequence[TextQuestion],
    sides: Sequence[Side],
    records: dict[str, Record],
    *,
    batch: int,
    max_new_tokens: int,
    session: int,
) -> Iterator[str]:
    """Fill the records, round by round; yields the key of the side that has answered a batch.

    Args:
        text_model: the model.
        questions: all of them.
        sides: who answers.
        records: by the sides' keys; changed.
        batch: questions answered together.
        max_new_tokens: of an answer.
        session: number of this run, for the records.
    """
    window = CausalLMWindow(text_model.model)
    synchronise = synchronise_for(str(window.device))
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "synchronise": synchronise}
    by_key = {side.key: side for side in sides}
    is_warm = False
    for index in range(count_rounds(len(questions), batch)):
        order = order_of(list(by_key), index)
        wanted = [by_key[key] for key in order if len(records[key]["seconds"]) <= index]
        if not wanted:
            continue
        asked = questions[index * batch : (index + 1) * batch]
        prompts = text_model.encode(asked)
        n_tokens = round(fmean(len(prompt) for prompt in prompts))
        methods = {side.key: side.make(n_tokens) for side in wanted}
        if not is_warm:
            answer(window, prompts, methods[wanted[0].key], text_model.ends, **options)
            is_warm = True
        shared = share_prompts(window, prompts, list(methods.values()), synchronise)
        for side in wanted:
            own = methods[side.key]
            began = time.perf_counter()
            begun = shared.get(find_pass(own))
            tokens, cost = answer(window, prompts, own, text_model.ends, shared=begun, **options)
            seconds = time.perf_counter() - began + cost.shared_seconds
            texts = text_model.decode(tokens)
            record = records[side.key]
            record["right"] += "".join(
                "01"[question.is_right(text)] for text, question in zip(texts, asked, strict=True)
            )
            entry = {
                "seconds": round(seconds, 5),
                "prefill_seconds": round(cost.prefill_seconds, 5),
                "pass_seconds": round(median(cost.pass_seconds), 6),
                "kept": round(cost.kept, 5),
                "bytes": round(cost.bytes),
                "blocks": None if cost.blocks is None else round(cost.blocks, 5),
                "answers": texts,
                "sessions": session,
            }
            for name, value in entry.items():
                record[name].append(value)
            yield side.key


@torch.no_grad()
def answer(
    window: CausalLMWindow,
    prompts: Sequence[Tensor],
    methods: LayerMethods,
    ends: Sequence[int],
    *,
    max_new_tokens: int,
    synchronise: Callable[[], object] = lambda: None,
    shared: SharedPrompts | None = None,
) -> tuple[Tensor, Cost]:
    """Greedy answers to R prompts, and what they cost.

    Args:
        window: over the model.
        prompts: ids `[T]` int64 of each, at least 2.
        methods: of the layers.
        ends: ids that end an answer.
        max_new_tokens: of an answer.
        synchronise: waits for the device.
        shared: the prompts' pass; None: it is done here.

    Returns:
        `[R, L]` int64, tokens up to the last row's end; what follows a row's own end means nothing.
    """
    device = window.device
    cost = Cost()
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device, dtype=torch.int64)
    tokens = pad_sequence(list(prompts), batch_first=True).to(device)  # [R, T]
    stops = lengths.new_tensor(list(ends))
    made = []
    with reducing(window, methods, 1):
        synchronise()
        began = time.perf_counter()
        window.reserve(len(prompts), tokens.shape[1] + max_new_tokens)
        n_before = lengths - (0 if window.takes_whole_prompts else 1)
        if shared is None:
            part = tokens[:, : int(n_before.max())]
            window.prefill(Pass(part, torch.zeros_like(lengths), lengths=n_before))
        else:
            shared.begin(window, methods)
            cost.shared_seconds = shared.seconds
        synchronise()
        cost.prefill_seconds = time.perf_counter() - began + cost.shared_seconds
        last = tokens.gather(1, lengths[:, None] - 1)  # [R, 1]
        has_ended = torch.zeros_like(last, dtype=torch.bool)
        for k in range(max_new_tokens):
            began = time.perf_counter()
            last = window.forward(Pass(last, lengths - 1 + k)).argmax(-1)
            synchronise()
            cost.pass_seconds.append(time.perf_counter() - began)
            made.append(last)
            has_ended |= torch.isin(last, stops)
            if has_ended.all():
                break
        cost.kept, cost.bytes = _measure_cache(window, n_before)
        n_passes = len(made) - int(window.takes_whole_prompts)  # the first token is the prompt's
        cost.blocks = _measure_blocks(window, methods, n_before, n_passes)
    cost.pass_seconds = cost.pass_seconds[1:] or cost.pass_seconds
    return torch.cat(made, 1).cpu(), cost


def _measure_cache(window: CausalLMWindow, lengths: Tensor) -> tuple[float, float]:
    """`Cost.kept` and `Cost.bytes` of a window that holds prompts of `lengths` `[R]`."""
    kept = []
    for layer in window.run_caches().served:
        dropped = layer.layout.dropped
        stayed = lengths if dropped is None else lengths - dropped.to(lengths.device)
        n_kept = float(stayed.sum())
        if layer.parts:  # the mean of heads
            n_kept = float(
                torch.cat([part.counts for part in layer.parts], 1).sum(0).float().mean(0)
            )
        kept.append(n_kept / float(lengths.sum()))
    n_bytes = sum(layer.nbytes for layer in window.run_caches().layers)
    return fmean(kept), n_bytes / len(lengths)


def _measure_blocks(
    window: CausalLMWindow, methods: LayerMethods, lengths: Tensor, n_passes: int
) -> float | None:
    """`Cost.blocks` of a window that held prompts of `lengths` `[R]` before n passes."""
    counts = window.block_counts
    if methods.attention is None or counts is None:
        return None
    size = methods.attention.block
    layers = window.run_caches().served
    n_lists = len(layers) * layers[0].held()[0].shape[1]  # of a row: each key head in each layer
    if methods.attention.chooses_prompts:
        tiles = -(-lengths // size)
        n_blocks = int((tiles * (tiles + 1) // 2).sum())  # a tile sees itself and those before
    else:
        ends = lengths[:, None] + 1 + torch.arange(n_passes, device=lengths.device)
        n_blocks = int((-(-ends // size)).sum())
    return 1 - counts.left_out / (n_blocks * n_lists)
