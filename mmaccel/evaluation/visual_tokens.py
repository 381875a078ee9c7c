"""What fewer visual tokens cost in answers about images, and what they save.

Controls are always among the sides: a random choice, an even one, and plain downsampling, of tokens
and, where the library has it, of pixels. Columns are counted by hooks behind the layers, so that
every method is counted alike; operations follow by a formula, `layer_flops`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.catalog import REDUCERS, find_own, load
from mmaccel.checks import show, suggest
from mmaccel.errors import OptionError
from mmaccel.evaluation.answers import AskedModel, Side
from mmaccel.evaluation.measure import synchronise
from mmaccel.evaluation.questions import IMAGE_FIELDS, Question
from mmaccel.evaluation.tables import VISUAL_COLUMNS
from mmaccel.handle import attach
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
from mmaccel.pipelines.hosts.loading.sources import find_model
from mmaccel.pipelines.hosts.vision_language.visuals import find_placeholder
from mmaccel.pipelines.image_to_text.loading import open_vision_language
from mmaccel.pipelines.image_to_text.prompts import make_inputs, read_image

CHANCE = "RandomTokens"
_KNOWN = {entry.target.split(":")[1]: short for short, entry in REDUCERS.items()}
CONTROLS = tuple(
    name for name in ("DownsamplePixels", "Downsample", CHANCE, "UniformTokens") if name in _KNOWN
)
METHODS = (*CONTROLS, *(name for name in _KNOWN if name not in CONTROLS))
FORMULA = (
    "sum over layers of 2 n W + 4 n^2 H D, and 2 C V once: n columns of a question's prompt in "
    "that layer, W = C D (2 H + 2 K) + 3 C I weights of its projections and gated MLP, C width, I "
    "inner width, H heads and K key heads of D, V vocabulary; a product and a sum are two "
    "operations, attention counts all pairs of columns"
)
_HIDDEN = -1e4  # a mask of numbers hides what has this or less
_ENCODE = "_prepare_multimodal_encoder_kwargs_for_generation"  # of transformers' GenerationMixin


@dataclass(frozen=True)
class VisionModel(AskedModel):
    """A vision-language model of transformers with its processor, which pads on the left."""

    option = "--keep"
    rows = "sides"
    kind = "kind"
    level = "keep"
    whole = "all"
    chance = CHANCE
    easy = CONTROLS[:-2]
    same = ("weights", "digest", "batch", "max_new_tokens", "dtype", "device", "seed")
    counted = ("visual_tokens", "layer_tokens", "flops")
    timed = ("encoder_seconds", "prefill_seconds", "seconds")
    columns = VISUAL_COLUMNS
    note = (
        "tokens: visual tokens after the last layer (mean over layers). ms: medians a question. "
        "informative: right where all tokens are and downsampling is not (of how many)."
    )
    fields = IMAGE_FIELDS
    first = Side("all tokens", "all tokens", 1.0, lambda n_tokens: None, {"method": "all tokens"})
    demo = "scenes-vqa"
    short = 4
    model: Any
    processor: Any
    is_demo: bool

    @staticmethod
    def list_sides(texts: Sequence[str], levels: Sequence[float]) -> list[Side]:
        """See `AskedModel`; what a method's own rule leaves is one of its sides, at a level of
        1."""
        sides = []
        for name in parse_methods(texts):
            target = None if name in METHODS else find_own("visual_tokens", name)
            method = load(REDUCERS[_KNOWN[name]].target if target is None else target)
            by_rule = [] if method.needs_budget else [(1.0, method())]
            for keep, reducer in by_rule + [(keep, method(keep=keep)) for keep in levels]:
                make = partial(_same, reducer)
                sides.append(Side(repr(reducer), name, keep, make, {"method": name}, group=name))
        return sides

    @staticmethod
    def slots(made: Any) -> dict[str, Any]:
        return {"visual_tokens": made}

    def prepare(
        self, asked: Sequence[Question], seeds: Sequence[int], sides: Sequence[Side]
    ) -> Any:
        return self.encode(asked), seeds

    def answer(self, side: Side, inputs: Any, max_new_tokens: int) -> dict[str, Any]:
        encoded, seeds = inputs
        texts, cost = answer(
            self, encoded, side.make(0), seeds=seeds, max_new_tokens=max_new_tokens
        )
        tokens = count_visual(self.model, encoded, cost.columns).double()
        return {
            "texts": texts,
            "seconds": cost.seconds,
            "encoder_seconds": cost.encoder_seconds,
            "prefill_seconds": cost.prefill_seconds,
            "visual_tokens": float(tokens[:, -1].mean()),
            "layer_tokens": float(tokens.mean()),
            "flops": float(cost.flops.mean()),
        }

    def encode(self, questions: Sequence[Question]) -> dict[str, Any]:
        """Arguments of `generate` for a batch of questions, on the model's device."""
        images: list[Any] = [
            [one.image if isinstance(one.image, Tensor) else read_image(one.image)]
            for one in questions
        ]
        inputs = make_inputs(self.processor, [one.text for one in questions], images)
        return dict(inputs.to(self.model.device))

    def decode(self, tokens: Any) -> list[str]:
        texts: list[str] = self.processor.batch_decode(tokens, skip_special_tokens=True)
        return texts


def open_model(name: str, device: Any, dtype: torch.dtype) -> VisionModel:
    """A model by its name: "scenes-vqa"; a folder with weights of it, which has no tokenizer; or a
    folder or hub id of a vision-language model with its processor.
    """
    from mmaccel.demo.loading import load_demo

    folder = None if name == VisionModel.demo else find_model(name, {})
    if folder is None or (folder.is_dir() and not any(folder.glob("*token*"))):
        model, processor = load_demo(VisionModel.demo, folder)
        return VisionModel(model.to(device, dtype), processor, True)
    load_config = LoadConfig(device=device, dtype=dtype)
    return VisionModel(*open_vision_language(name, load_config)[:2], False)


def draw_questions(per_kind: int) -> list[Question]:
    """Questions about scenes that no training saw, `per_kind` of each kind."""
    from mmaccel.demo.scenes_vqa.data import list_questions

    asked = list_questions(per_kind)
    return [Question(one.kind, one.text, one.answer, image=image) for image, one in asked]


def parse_methods(texts: Iterable[str]) -> list[str]:
    """Methods by names in any case, with or without `-` and `_`, controls first; none: all."""

    def plain(name: str) -> str:
        return name.lower().replace("-", "").replace("_", "")

    spelled = {plain(text): name for name in METHODS for text in (name, _KNOWN[name])}
    names = []
    for text in texts:
        name = spelled.get(plain(text))
        if name is None and find_own("visual_tokens", text) is not None:
            name = text
        if name is None:
            raise OptionError(
                f"--methods: expected some of {', '.join(REDUCERS)}, received {show(text)}; "
                f"{suggest(text, REDUCERS, 'controls are always measured')}"
            )
        names.append(name)
    return list(dict.fromkeys([*CONTROLS, *names])) if names else list(METHODS)


def _same(method: Any, n_tokens: int) -> Any:
    return method


def answer(
    vlm: VisionModel,
    inputs: dict[str, Any],
    method: Any,
    *,
    seeds: Sequence[int],
    max_new_tokens: int,
) -> tuple[list[str], PromptCost]:
    """Greedy answers to a batch of R questions, token by token, and what they cost."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
    how: dict[str, Any] = {"strict": True, "seed": list(seeds), "cuda_graphs": False}
    with attach(vlm.model, "autoregressive", visual_tokens=method, **how):
        with watch_prompt(vlm.model) as cost, torch.no_grad():
            ids = vlm.model.generate(**inputs, **options)
    return vlm.decode(ids[:, inputs["input_ids"].shape[1] :]), cost


def count_visual(model: Any, inputs: dict[str, Any], columns: Tensor) -> Tensor:
    """Visual tokens in each layer, `[R, L]`, of prompts that have `columns` `[R, L]` there: all but
    text; ends of an image's rows count as visual.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    text = mask & (ids != find_placeholder(model, "image"))
    return columns - text.sum(1, keepdim=True).cpu()


@dataclass
class PromptCost:
    """The prompt's part of a `generate` call of R rows and a model of L layers."""

    encoder_seconds: float = 0.0  # of encoding images
    # from then to the first token's logits: reduction, and the prompt's pass
    prefill_seconds: float = 0.0
    seconds: float = 0.0  # of the whole call
    # `[R, L]` int64, columns that each layer processed last, without padding
    columns: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    # `[R]` float64, of all passes up to the first token
    flops: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))


@contextmanager
def watch_prompt(model: Any) -> Iterator[PromptCost]:
    """Measure the `generate` call inside the block; the result is whole after it. Captured passes
    (CUDA graphs) run no hooks: attach with `cuda_graphs=False`.
    """
    cost = PromptCost()
    layers = list(model.get_decoder().layers)
    passes: list[tuple[int, tuple[int, int], Any]] = []  # (layer, (rows, columns), mask)
    encode_own = getattr(model, _ENCODE)

    def now() -> float:
        synchronise(model.device)
        return time.perf_counter()

    began = encoded = now()

    def note(_: Any, args: Any, given: dict[str, Any], made: Any, *, index: int) -> None:
        if not cost.prefill_seconds:
            hidden = made[0] if isinstance(made, tuple) else made
            mask = given.get("attention_mask")
            seen = None if mask is None else mask if mask.ndim == 2 else mask[:, 0, -1]
            passes.append((index, hidden.shape[:2], seen))

    def finish(*_: Any) -> None:
        if not cost.prefill_seconds:
            cost.prefill_seconds = now() - encoded

    def encode(*args: Any, **given: Any) -> Any:
        nonlocal encoded
        start = now()
        arguments = encode_own(*args, **given)
        encoded = now()
        cost.encoder_seconds = encoded - start
        return arguments

    hooks = [
        layer.register_forward_hook(partial(note, index=index), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    hooks.append(model.get_output_embeddings().register_forward_hook(finish))
    setattr(model, _ENCODE, encode)
    try:
        yield cost
        cost.seconds = now() - began
    finally:
        delattr(model, _ENCODE)
        for hook in hooks:
            hook.remove()
    _count(cost, model.config.get_text_config(), passes, layers)


def _count(cost: PromptCost, config: Any, passes: list[Any], layers: Sequence[Any]) -> None:
    rows = passes[0][1][0]
    cost.columns = torch.zeros(rows, len(layers), dtype=torch.int64)
    cost.flops = torch.full((rows,), head_flops(config), dtype=torch.float64)
    slides = [  # whether a layer's mask shows a window alone
        getattr(getattr(layer, "self_attn", None), "sliding_window", None) is not None
        for layer in layers
    ]
    whole = next((each for each in passes if not slides[each[0]]), None)
    for index, shape, mask in passes:
        if slides[index]:  # such models have the same columns in all layers
            _, shape, mask = (index, shape, None) if whole is None else whole
        seen = torch.full((rows,), shape[1], dtype=torch.int64)
        if mask is not None:
            shown = mask > _HIDDEN if mask.is_floating_point() else mask.bool()
            seen = shown.sum(-1).cpu().expand(rows)
        cost.columns[:, index] = seen
        cost.flops += layer_flops(config, seen)


def layer_flops(config: Any, columns: Tensor) -> Tensor:
    """Operations of a decoder layer for prompts of `columns` `[R]` columns; see `FORMULA`."""
    n, width, heads = columns.double(), config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or width // heads
    weights = width * size * 2 * (heads + kv_heads) + 3 * width * config.intermediate_size
    return 2 * n * weights + 4 * n.square() * heads * size


def head_flops(config: Any) -> float:
    return 2.0 * config.hidden_size * config.vocab_size
