"""LlamaGen from the files its authors published: transformer and tokenizer."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.llamagen import LlamaGenConfig, LlamaGenTransformer
from mmaccel.tokenizers_vq.vqgan import VQGAN, VQGANConfig

_WRAPPERS = ("model", "module", "state_dict", "ema")  # what checkpoints keep weights under
_HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 3200: 32}  # GPT-B, -L, -XL, -XXL, -3B
_UNUSED = ("quantize.codebook_used", "freqs_cis")  # statistics of training, and what is computed


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """The tensors of a `.pt` or `.safetensors` file, out of whatever they are wrapped in.

    Raises:
        OptionError: there is no such file.
        UnsupportedModelError: it holds no tensors.
    """
    file = Path(file)
    if not file.is_file():
        raise OptionError(f"weights: expected a file, received {str(file)!r}; check the path")
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    try:
        with torch.serialization.safe_globals([Namespace]):  # training saves its arguments too
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UnsupportedModelError(
            f"weights: expected a checkpoint of tensors, received {file} ({reason}); "
            "download it again, or save its tensors as .safetensors"
        ) from error
    while isinstance(content, dict):
        inner = [content[name] for name in _WRAPPERS if isinstance(content.get(name), dict)]
        if not inner:
            break
        content = inner[0]
    if not (isinstance(content, dict) and any(isinstance(v, Tensor) for v in content.values())):
        received = sorted(map(str, content))[:5] if isinstance(content, dict) else type(content)
        raise UnsupportedModelError(
            f"weights: expected tensors by name in {file}, received {received}; "
            f"give a checkpoint that has them, or one of {', '.join(_WRAPPERS)}"
        )
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


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


def fill(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a module without memory its tensors, all of them and no others.

    Raises:
        UnsupportedModelError: naming the first that is missing, surplus or of another shape.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    given = {n: tuple(t.shape) for n, t in weights.items() if n not in _UNUSED}
    kind = type(module).__name__
    for what, names in (
        ("missing", sorted(wanted.keys() - given.keys())),
        ("surplus", sorted(given.keys() - wanted.keys())),
        (
            "of another shape",
            sorted(n for n in wanted.keys() & given.keys() if wanted[n] != given[n]),
        ),
    ):
        if names:
            first = names[0]
            shapes = f", {wanted.get(first, '-')} wanted and {given.get(first, '-')} given"
            raise UnsupportedModelError(
                f"weights: expected the tensors of {kind}, received {len(names)} {what}, such as "
                f"{first}{shapes}; give the published file of this size"
            )
    module.load_state_dict({n: weights[n] for n in wanted}, assign=True)
