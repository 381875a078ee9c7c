"""VQGAN weights under the names of the original code, for our module.

P. Esser et al., "Taming Transformers for High-Resolution Image Synthesis", CVPR 2021 (arXiv
2012.09841). Chameleon's `vqgan.ckpt` and the `vqmodel` of transformers' Chameleon have these names;
`mmaccel.tokenizers_vq.vqgan.VQGAN` has LlamaGen's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

_OURS = ("encoder.", "decoder.", "quantize.embedding.", "quant_conv.", "post_quant_conv.")
_MIDDLE = {"block_1": "0", "attn_1": "1", "block_2": "2"}


def rename_taming(weights: Mapping[str, Tensor], n_levels: int) -> dict[str, Tensor]:
    """Tensors of encoder, decoder and codebook under our names; the others (losses) are left out.

    Args:
        weights: by their names in the original code.
        n_levels: resolutions of the VQGAN; the original counts the decoder's from the highest.
    """
    return {
        _rename(name, n_levels): tensor
        for name, tensor in weights.items()
        if name.startswith(_OURS)
    }


def _rename(name: str, n_levels: int) -> str:
    name = re.sub(r"\.mid\.(block_1|attn_1|block_2)\.", lambda m: f".mid.{_MIDDLE[m[1]]}.", name)
    name = re.sub(r"^encoder\.down\.(\d+)\.", r"encoder.conv_blocks.\1.", name)
    name = re.sub(
        r"^decoder\.up\.(\d+)\.", lambda m: f"decoder.conv_blocks.{n_levels - 1 - int(m[1])}.", name
    )
    return re.sub(r"(conv_blocks\.\d+)\.block\.", r"\1.res.", name)
