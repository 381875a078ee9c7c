"""How block-causal model classes read attention masks: declared per class, and then self-checked.

*The pipeline's own call* passes a 2-D mask, which LLaDA2.0 and 2.1 as released refuse, ports read
causally, or as all visible columns, or as blocks; only logits that depend on no later block can be
cached. *The model's own generate* passes a 4-D block mask, block-causal by construction.

T. Bie et al., "LLaDA2.0: Scaling Up Diffusion Language Models to 100B", 2025, arXiv 2512.15745,
section 5.4 (a block is sampled given the blocks before it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import Checked, one_of
from mmaccel.pipelines.hosts.layers.masks import MASK_FORMS
from mmaccel.samplers.canvas.layout import seen_blocks

READINGS = ("blocks", "causal")


@dataclass(frozen=True)
class BlockMasks(Checked):
    """How a model class reads masks."""

    # of a 2-D mask: "blocks", to its own block and those before it; "causal", to no later entry;
    # None, to later blocks, or not at all, so that nothing can be cached
    reading: str | None = one_of(None, READINGS)
    # of a 4-D mask: "additive" to scores, "bool", or "zero-one", where 1 is visible
    form: str = one_of("additive", MASK_FORMS)


BLOCK_MASKS = {"LLaDA2MoeModelLM": BlockMasks(None, "additive")}
"""Declarations by class name; add your own model's. The self-check finds a wrong one."""

_TRANSFORMERS = BlockMasks("causal", "additive")  # of its decoders


def find_masks(model: Any) -> BlockMasks | None:
    kind = type(model)
    own = _TRANSFORMERS if kind.__module__.startswith("transformers.") else None
    return BLOCK_MASKS.get(kind.__name__, own)


def make_reads(visible: Tensor, first: int, block: int, reading: str) -> Tensor:
    """What columns from `first` on attend to, `[R, N - first, N]` bool, of visible `[R, N]`."""
    columns = torch.arange(visible.shape[1], device=visible.device)
    seen = seen_blocks(columns, columns[first:], 1 if reading == "causal" else block)
    return visible[:, None].bool() & seen
