"""What the prompt of a `generate` call costs: seconds, and the columns that each layer processed.

Columns are counted where they are processed, by hooks behind the layers, so that every method is
counted alike, wherever it works. Operations follow from the columns by a formula, `layer_flops`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FORMULA = (
    "sum over layers of 2 n W + 4 n^2 H D, and 2 C V once: n columns of a question's prompt in "
    "that layer, W = C D (2 H + 2 K) + 3 C I weights of its projections and gated MLP, C width, I "
    "inner width, H heads and K key heads of D, V vocabulary; a product and a sum are two "
    "operations, attention counts all pairs of columns"
)
_HIDDEN = -1e4  # a mask of numbers hides what has this or less
_ENCODE = "_prepare_multimodal_encoder_kwargs_for_generation"  # of transformers' GenerationMixin


@dataclass
class PromptCost:
    """The prompt's part of a `generate` call of R rows and a model of L layers.

    Attributes:
        encoder_seconds: of encoding images.
        prefill_seconds: from then to the first token's logits: reduction, and the prompt's pass.
        seconds: of the whole call.
        step_seconds: of each further token, between the logits of two.
        columns: `[R, L]` int64, columns that each layer processed last, without padding.
        flops: `[R]` float64, of all passes up to the first token.
    """

    encoder_seconds: float = 0.0
    prefill_seconds: float = 0.0
    seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    columns: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    flops: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))


@contextmanager
def watch_prompt(model: Any, synchronise: Callable[[], object]) -> Iterator[PromptCost]:
    """Measure the `generate` call inside the block; its result is whole after the block. Passes
    that are captured as CUDA graphs run no hooks: attach with `cuda_graphs=False`.

    Args:
        model: a vision-language model of transformers.
        synchronise: waits for the device.
    """
    cost = PromptCost()
    layers = list(model.get_decoder().layers)
    passes: list[tuple[int, tuple[int, int], Any]] = []  # (layer, (rows, columns), mask)
    is_done = False
    began = encoded = last = time.perf_counter()

    def note(index: int) -> Any:
        def hook(_: Any, args: Any, given: dict[str, Any], made: Any) -> None:
            if not is_done:
                hidden = made[0] if isinstance(made, tuple) else made
                mask = given.get("attention_mask")
                seen = None if mask is None else mask if mask.ndim == 2 else mask[:, 0, -1]
                passes.append((index, hidden.shape[:2], seen))

        return hook

    def finish(*_: Any) -> None:
        nonlocal is_done, last
        synchronise()
        now = time.perf_counter()
        if is_done:
            cost.step_seconds.append(now - last)
        else:
            cost.prefill_seconds, is_done = now - encoded, True
        last = now

    own = getattr(model, _ENCODE)

    def encode(*args: Any, **given: Any) -> Any:
        nonlocal encoded
        synchronise()
        start = time.perf_counter()
        found = own(*args, **given)
        synchronise()
        encoded = time.perf_counter()
        cost.encoder_seconds = encoded - start
        return found

    hooks = [
        layer.register_forward_hook(note(index), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    hooks.append(model.get_output_embeddings().register_forward_hook(finish))
    setattr(model, _ENCODE, encode)
    synchronise()
    began = encoded = time.perf_counter()
    try:
        yield cost
        synchronise()
        cost.seconds = time.perf_counter() - began
    finally:
        delattr(model, _ENCODE)
        for hook in hooks:
            hook.remove()
    slides = [_slides(layer) for layer in layers]
    cost.columns, cost.flops = _count(model.config.get_text_config(), passes, slides)


def _slides(layer: Any) -> bool:
    """Whether a layer's mask shows a window alone."""
    return getattr(getattr(layer, "self_attn", None), "sliding_window", None) is not None


def _count(config: Any, passes: list[Any], slides: list[bool]) -> tuple[Tensor, Tensor]:
    """`PromptCost.columns` and `PromptCost.flops`."""
    rows = passes[0][1][0]
    columns = torch.zeros(rows, len(slides), dtype=torch.int64)
    flops = torch.full((rows,), head_flops(config), dtype=torch.float64)
    whole = next((p for p in passes if not slides[p[0]]), None)
    for index, shape, mask in passes:
        if slides[index]:  # such models have the same columns in all layers
            _, shape, mask = (index, shape, None) if whole is None else whole
        seen = (
            torch.full((rows,), shape[1], dtype=torch.int64)
            if mask is None
            else _seen(mask).expand(rows)
        )
        columns[:, index] = seen
        flops += layer_flops(config, seen)
    return columns, flops


def _seen(mask: Tensor) -> Tensor:
    """How many columns a mask `[R, T]` of bools, integers or numbers that are added shows."""
    shown = mask > _HIDDEN if mask.is_floating_point() else mask.bool()
    return shown.sum(-1).cpu()


def layer_flops(config: Any, columns: Tensor) -> Tensor:
    """Operations of a decoder layer for prompts of `columns` `[R]` columns; see `FORMULA`."""
    n, width, heads, kv_heads, size = columns.double(), *_sizes(config)
    weights = width * size * 2 * (heads + kv_heads) + 3 * width * config.intermediate_size
    return 2 * n * weights + 4 * n.square() * heads * size


def head_flops(config: Any) -> float:
    """Operations of the logits of one column."""
    return 2.0 * config.hidden_size * config.vocab_size


def _sizes(config: Any) -> tuple[int, int, int, int]:
    width, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return width, heads, kv_heads, getattr(config, "head_dim", None) or width // heads
