"""VQGAN with codes of several scales: the image tokenizer of VAR's published checkpoints.

K. Tian et al., "Visual Autoregressive Modeling", NeurIPS 2024 (arXiv 2404.02905), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from mmaccel.tokenizers_vq.multi_scale import MultiScaleQuantizer
from mmaccel.tokenizers_vq.vqgan import VQGAN, VQGANConfig, rename_taming

_PHI = "quantize.quant_resi.qresi_ls."


class MultiScaleVQGAN(VQGAN):
    """A `VisualTokenizer` whose tokens are `[B, L]`, scale after scale; HART's if it `has_rest`, a
    residual of the latents without codes, which is left out here.
    """

    quantize: MultiScaleQuantizer

    def __init__(self, config: VQGANConfig, sides: Sequence[int], has_rest: bool = False) -> None:
        super().__init__(config, (sides[-1], sides[-1]))
        sizes = (config.n_codes, config.code_width)
        self.quantize = MultiScaleQuantizer(sides, *sizes, has_rest=has_rest)

    def nearest(self, latents: Tensor) -> Tensor:
        return self.quantize.encode(latents)

    def latents(self, tokens: Tensor) -> Tensor:
        return self.quantize.decode(tokens)


def rename_published(weights: Mapping[str, Tensor], n_levels: int) -> dict[str, Tensor]:
    """The tensors of a published file, such as `vae_ch160v4096z32.pth`, for `MultiScaleVQGAN`."""
    phi = {
        name.replace(_PHI, "quantize.phi."): tensor
        for name, tensor in weights.items()
        if name.startswith(_PHI)
    }
    return rename_taming(weights, n_levels) | phi
