"""How block-causal model classes read attention masks: declared per class, and then self-checked.

Two kinds of mask reach a LLaDA2. *The pipeline's own call* passes a 2-D mask, and published code
answers it in four ways: LLaDA2.0 and 2.1 as released refuse it, ports of them read it causally,
token by token, others attend to everything that is visible, and a model may make its own block mask
of it. Only what depends on no later block can be cached. *The block mask of the model's own
generate* is a 4-D one: there the model is block-causal by construction.

T. Bie et al., "LLaDA2.0: Scaling Up Diffusion Language Models to 100B", 2025, arXiv 2512.15745,
section 5.4 (a block is sampled given the blocks before it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.pipelines.causal_lm.kv_cache import mask_reads

READINGS = ("blocks", "causal")
FORMS = ("additive", "bool", "zero-one")


@dataclass(frozen=True)
class BlockMasks:
    """How a model class reads masks.

    Attributes:
        reading: of a 2-D mask: "blocks" where an entry looks at its own block and those before it,
            "causal" where it looks at no later entry; None where it looks at later blocks, or where
            the model takes no 2-D mask, so that nothing can be cached.
        form: of a 4-D mask: "additive" where it is added to scores, "bool", or "zero-one" where
            numbers are 1 at what may be looked at.

    Raises:
        OptionError: another reading or form.
    """

    reading: str | None = None
    form: str = "additive"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("reading", self.reading, (*READINGS, None)),
            ("form", self.form, FORMS),
        ):
            if value not in known:
                raise OptionError(
                    f"{name}: expected one of {known}, received {value!r}; declare what the "
                    "model's forward does with its attention_mask"
                )


BLOCK_MASKS = {"LLaDA2MoeModelLM": BlockMasks(None, "additive")}
"""Declarations by class name; add your own model's. A wrong one is found by the self-check."""

_TRANSFORMERS = BlockMasks("causal", "additive")  # of its decoders


def find_masks(model: Any) -> BlockMasks | None:
    """What is declared of a model's class; None where nobody has declared anything."""
    kind = type(model)
    own = _TRANSFORMERS if kind.__module__.startswith("transformers.") else None
    return BLOCK_MASKS.get(kind.__name__, own)


def make_reads(visible: Tensor, first: int, last: int, block: int, reading: str) -> Tensor:
    """What the entries of columns `first..last - 1` look at.

    Args:
        visible: `[R, N]` bool or integers, columns that hold anything; N at least `last`.
        first, last: columns.
        block: columns per block, counted from column 0.
        reading: one of `READINGS`.

    Returns:
        `[R, last - first, last]` bool.
    """
    keys = torch.arange(last, device=visible.device)
    queries = keys[first:, None]
    if reading == "blocks":
        keys, queries = keys // block, queries // block
    return visible[:, None, :last].bool() & (keys <= queries)


def make_form(reads: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    """What may be looked at, `[R, C, S]` bool, as a mask `[R, 1, C, S]` in one of `FORMS`."""
    mask = reads[:, None]
    if form == "bool":
        return mask
    if form == "zero-one":
        return mask.to(dtype)
    return mask_reads(reads, reads.shape[1], dtype)
