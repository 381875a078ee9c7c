"""LlamaGen from the files its authors published: transformer and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.llamagen import LlamaGenTransformer
from mmaccel.pipelines.llamagen_blocks import LlamaGenConfig
from mmaccel.pipelines.weights_file import fill
from mmaccel.tokenizers_vq.vqgan import VQGAN, VQGANConfig

_HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 3200: 32}  # GPT-B, -L, -XL, -XXL, -3B


def load_transformer(
    weights: Mapping[str, Tensor],
    *,
    block_size: int = 256,
    n_head: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LlamaGenTransformer:
    """Build the transformer that a checkpoint's tensors fit.

    Args:
        weights: of `read_weights`.
        block_size: tokens of a picture: 256 for 256 pixels a side, 576 for 384, 1024 for 512. The
            tensors do not tell.
        n_head: heads of a layer; None takes the published size with this width.
        dtype, device: where and in what to run.

    Raises:
        OptionError: a width no published size has, and no `n_head`.
        UnsupportedModelError: tensors that are missing, surplus or of another shape; with names.
    """
    table = weights.get("tok_embeddings.weight")
    if table is None:
        raise UnsupportedModelError(
            f"weights: expected a LlamaGen transformer with tok_embeddings.weight, received "
            f"{', '.join(sorted(weights)[:4])} …; give the file of the transformer"
        )
    vocab_size, dim = table.shape
    heads = _HEADS.get(dim) if n_head is None else n_head
    if heads is None:
        raise OptionError(
            f"n_head: expected the number of heads for width {dim}, received none; published "
            f"widths are {', '.join(map(str, _HEADS))}"
        )
    labels = weights.get("cls_embedding.embedding_table.weight")
    caption = weights.get("cls_embedding.uncond_embedding")
    config = LlamaGenConfig(
        dim=dim,
        n_layer=1
        + max((int(k.split(".")[1]) for k in weights if k.startswith("layers.")), default=0),
        n_head=heads,
        vocab_size=vocab_size,
        block_size=block_size,
        cls_token_num=1 if caption is None else caption.shape[0],
        num_classes=1 if labels is None else labels.shape[0] - 1,
        caption_dim=0 if caption is None else caption.shape[1],
    )
    with torch.device("meta"):
        model = LlamaGenTransformer(config)
    fill(model, weights)
    return model.to(device, dtype).eval().requires_grad_(False)


def load_tokenizer(
    weights: Mapping[str, Tensor], grid: tuple[int, int], config: VQGANConfig | None = None
) -> VQGAN:
    """Build the picture tokenizer; by default that of 16 pixels a token, `vq_ds16`, with as many
    codes as there are.

    Raises:
        UnsupportedModelError: as in `load_transformer`.
    """
    if config is None:
        table = weights.get("quantize.embedding.weight")
        config = VQGANConfig() if table is None else VQGANConfig(n_codes=table.shape[0])
    with torch.device("meta"):
        tokenizer = VQGAN(config, grid)
    fill(tokenizer, weights)
    return tokenizer.float().eval().requires_grad_(False)
