"""What smaller caches and sparse attention cost in answers about long texts, and what they save.

A budget is a fraction of the prompt: of its entries that an evicting method keeps, of its blocks
that another reads in a pass. A method whose fields fix it is measured once. Controls are always
among the sides: entries drawn by chance, and the last ones alone. Questions are answered by the
passes that `mmaccel.attach` makes: the prompt, eviction, then one token a pass.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmaccel.catalog import DEMO_WEIGHTS, METHODS, find_own, load, make, read_named
from mmaccel.checks import show, suggest
from mmaccel.contracts import Pass
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.evaluation.answers import AskedModel, Side
from mmaccel.evaluation.measure import synchronise
from mmaccel.evaluation.questions import TEXT_FIELDS, Question
from mmaccel.evaluation.tables import CACHE_COLUMNS
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers.methods import LayerMethods, reducing
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, load_causal_lm
from mmaccel.pipelines.hosts.loading.sources import find_model
from mmaccel.pipelines.hosts.loading.tasks import check_task

_COMMAND = "evaluate cache"
SLOTS = ("kv_cache", "attention")
CHANCE = "random-eviction"
# One of `SLOTS`; a name of the catalog, of an entry point, or a `module:Name`; and its fields.
Method = tuple[str, str, Mapping[str, Any]]
CONTROLS: tuple[Method, ...] = (
    ("kv_cache", CHANCE, {}),
    ("kv_cache", "streaming-llm", {"sinks": 0}),
)


@dataclass(frozen=True)
class TextModel(AskedModel):
    """A causal language model with its tokenizer; the demo's is `recall`, or weights of it."""

    option = "--budgets"
    rows = "cache_sides"
    kind = "task"
    level = "budget"
    whole = "full"
    chance = CHANCE
    same = ("weights", "digest", "batch", "max_new_tokens", "dtype", "device")
    counted = ("kept", "bytes", "blocks")
    timed = ("prefill_seconds",)
    per_pass = ("pass_seconds",)
    more = ("answers",)
    columns = CACHE_COLUMNS
    note = (
        "budget: entries that stay, or blocks that are read, of a prompt's. kept: cached entries, "
        "mean over layers. blocks read: by all passes, mean over layers. KiB: keys and values as "
        "allocated, a row. ms: medians, a pass of one token, and the prompt a question."
    )
    fields = TEXT_FIELDS
    first = Side(
        "full cache",
        "full cache",
        None,
        lambda n_tokens: LayerMethods(),
        {"slot": "", "method": "full cache"},
    )
    demo = "recall"
    short = 10
    model: Any
    tokenizer: Any
    is_demo: bool

    @staticmethod
    def list_sides(texts: Sequence[str], levels: Sequence[float]) -> list[Side]:
        return [
            make_side(method, budget)
            for method in parse_methods(texts)
            for budget in (levels if takes_budget(method) else [None])
        ]

    @staticmethod
    def slots(made: LayerMethods) -> dict[str, Any]:
        return {"kv_cache": made.kv_cache, "attention": made.attention}

    @cached_property
    def window(self) -> CausalLMWindow:
        return CausalLMWindow(self.model)

    def look_at(self, questions: Sequence[Question], max_new_tokens: int) -> dict[str, Any]:
        lengths = sorted(len(prompt) for prompt in self.encode(questions))
        most = getattr(self.model.config, "max_position_embeddings", None)
        room = lengths[-1] if most is None else most - max_new_tokens
        if not 2 <= lengths[0] <= lengths[-1] <= room:
            raise UnsupportedModelError(
                f"prompts: expected 2 to {room} tokens, the positions of the model less "
                f"{max_new_tokens} of the answer, received {lengths[0]} to {lengths[-1]}; give "
                "others"
            )
        has_template = any(one.primer for one in questions) and self.tokenizer.chat_template
        return {"prompt_tokens": [lengths[0], lengths[-1]], "chat_template": bool(has_template)}

    def prepare(
        self, asked: Sequence[Question], seeds: Sequence[int], sides: Sequence[Side]
    ) -> tuple[list[Tensor], int]:
        prompts = self.encode(asked)
        return prompts, round(fmean(len(prompt) for prompt in prompts))

    def answer(self, side: Side, inputs: Any, max_new_tokens: int) -> dict[str, Any]:
        prompts, n_tokens = inputs
        methods = side.make(n_tokens)
        began = time.perf_counter()
        tokens, cost = answer(
            self.window, prompts, methods, self.ends, max_new_tokens=max_new_tokens
        )
        seconds = time.perf_counter() - began
        texts = self.decode(tokens)
        return {"texts": texts, "answers": texts, "seconds": seconds, **cost}

    @property
    def ends(self) -> list[int]:
        ids = self.model.generation_config.eos_token_id
        return [] if ids is None else list(ids) if isinstance(ids, list) else [ids]

    def encode(self, questions: Sequence[Question]) -> list[Tensor]:
        rendered = [self.tokenizer(**one.render(self.tokenizer))["input_ids"] for one in questions]
        return [torch.tensor(ids, dtype=torch.int64) for ids in rendered]

    def decode(self, tokens: Tensor) -> list[str]:
        """The answers in generated tokens `[R, L]`; what follows an end does not count."""
        ends = set(self.ends)
        texts = []
        for row in tokens.tolist():
            stop = next((k for k, token in enumerate(row) if token in ends), len(row))
            texts.append(self.tokenizer.decode(row[:stop], skip_special_tokens=True))
        return texts


def open_model(
    name: str, device: Any, dtype: torch.dtype, revision: str | None = None
) -> TextModel:
    """A model by its name: "recall", or a folder or hub id of a causal LM of transformers."""
    from mmaccel.demo.recall.words import WORDS

    check_task(name, _COMMAND)
    config = LoadConfig(device=device, dtype=dtype, revision=revision)
    source = find_model(name, {TextModel.demo: DEMO_WEIGHTS / TextModel.demo}, hub=config)
    check_task(source, _COMMAND)
    model, tokenizer = load_causal_lm(source, config)
    return TextModel(model, tokenizer, tokenizer.get_vocab().keys() == set(WORDS))


def draw_questions(per_task: int, length: int) -> list[Question]:
    from mmaccel.demo.recall.documents import list_questions
    from mmaccel.demo.recall.words import to_text

    questions = []
    for document, question in list_questions(per_task, length):
        ids = (*document.tokens, *question.prompt)[1:]  # the tokenizer adds the first one
        questions.append(Question(question.task, to_text(ids), to_text(question.answer[:-1])))
    return questions


def parse_methods(texts: Sequence[str]) -> list[Method]:
    """Methods, the controls first; none given: all of the catalog."""
    known = METHODS["kv_cache"] | METHODS["attention"]
    named = [read_named("--methods", text, known) for text in texts]
    controls = [control for control in CONTROLS if control[1] in METHODS[control[0]]]
    chosen: list[Method] = [(_find_slot(name), name, options) for name, options in named]
    every: list[Method] = [(slot, name, {}) for slot in SLOTS for name in METHODS[slot]]
    methods: list[Method] = []
    for method in [*controls, *(chosen or every)]:
        if method not in methods:
            methods.append(method)
    return methods


def _find_slot(name: str) -> str:
    known = {each: slot for slot in SLOTS for each in METHODS[slot]}
    if name in known:
        return known[name]
    for slot in SLOTS:
        try:
            if find_own(slot, name) is not None:
                return slot
        except OptionError:
            if slot == SLOTS[-1]:
                raise
    raise OptionError(
        f"--methods: expected some of {', '.join(known)}, received {show(name)}; "
        f"{suggest(name, known, 'controls are always measured')}"
    )


def make_side(method: Method, budget: float | None = None) -> Side:
    slot, name, options = method
    label = ":".join((name, *(f"{key}={value}" for key, value in options.items())))
    key = label if budget is None else f"{label} at {budget:g}"
    facts = {"slot": slot, "method": label}
    return Side(key, name, budget, partial(_make, method, budget), facts)


def _make(method: Method, budget: float | None, n_tokens: int) -> LayerMethods:
    slot, name, given = method
    options = dict(given)
    if budget is not None:
        options["budget"] = max(1, round(budget * n_tokens)) if slot == "kv_cache" else budget
    return LayerMethods(**{slot: make(slot, name, **options)})


def takes_budget(method: Method) -> bool:
    """Whether its budget may be chosen: neither fields nor another rule fix it (all by default)."""
    slot, name, options = method
    entry = METHODS[slot].get(name)
    target = find_own(slot, name) if entry is None else entry.target
    assert target is not None
    fixed = {**options, **({} if entry is None else entry.preset)}
    defaults = {one.name: one.default for one in fields(load(target)) if one.init}
    return "budget" in defaults.keys() - fixed.keys() and defaults["budget"] != 1.0


@torch.no_grad()
def answer(
    window: CausalLMWindow,
    prompts: Sequence[Tensor],
    methods: LayerMethods,
    ends: Sequence[int],
    *,
    max_new_tokens: int,
) -> tuple[Tensor, dict[str, float | None]]:
    """Greedy answers to R prompts, and what they cost.

    Args:
        prompts: ids `[T]` int64 of each, at least 2.

    Returns:
        `[R, L]` int64, tokens up to the last row's end; what follows a row's own end means nothing.
        And the cost: `prefill_seconds` of the prompts' pass and the eviction; `pass_seconds`, the
        median of the passes of one token but the first, which allocates; `kept`, share of a
        prompt's cached entries that stayed, mean over layers; `bytes` of keys and values of one row
        in all layers, as allocated; `blocks`, share that was read over all layers and passes, or
        over the prompt's for a method that chooses there, None where no method chooses blocks.
    """
    device = window.device
    tokens, lengths = _pad(prompts, device)
    stops = lengths.new_tensor(list(ends))
    answered, seconds = [], []

    def now() -> float:
        synchronise(device)
        return time.perf_counter()

    with reducing(window, methods, 1):
        began = now()
        window.reserve(len(prompts), tokens.shape[1] + max_new_tokens)
        n_before = lengths - (0 if window.takes_whole_prompts else 1)
        part = tokens[:, : int(n_before.max())]
        window.prefill(Pass(part, torch.zeros_like(lengths), lengths=n_before))
        prefill = now() - began
        last = tokens.gather(1, lengths[:, None] - 1)  # [R, 1]
        has_ended = torch.zeros_like(last, dtype=torch.bool)
        for k in range(max_new_tokens):
            began = now()
            last = window.forward(Pass(last, lengths - 1 + k)).argmax(-1)
            seconds.append(now() - began)
            answered.append(last)
            has_ended |= torch.isin(last, stops)
            if has_ended.all():
                break
        # where a prompt is processed whole, its pass gives the first token
        n_passes = len(answered) - int(window.takes_whole_prompts)
        layers = window.run_caches().layers
        cost = {
            "prefill_seconds": prefill,
            "pass_seconds": median(seconds[1:] or seconds),
            "kept": _measure_kept(window, n_before),
            "bytes": round(sum(layer.n_bytes for layer in layers) / len(prompts)),
            "blocks": _measure_blocks(window, methods, n_before, n_passes),
        }
    return torch.cat(answered, 1).cpu(), cost


def _pad(prompts: Sequence[Tensor], device: Any) -> tuple[Tensor, Tensor]:
    """Prompts `[R, T]` padded on the right, and their lengths `[R]`."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device, dtype=torch.int64)
    return pad_sequence(list(prompts), batch_first=True).to(device), lengths


def _measure_kept(window: CausalLMWindow, lengths: Tensor) -> float:
    """The share of cached entries that stayed of prompts of `lengths` `[R]`."""
    kept = []
    for layer in window.run_caches().served:
        n_kept = float(layer.count(lengths).float().mean(1).sum())  # the mean of heads
        kept.append(n_kept / float(lengths.sum()))
    return fmean(kept)


def _measure_blocks(
    window: CausalLMWindow, methods: LayerMethods, lengths: Tensor, n_passes: int
) -> float | None:
    """The share of blocks read by a window that held prompts of `lengths` `[R]` before n passes."""
    counts = window.layer_counts.block_counts
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
