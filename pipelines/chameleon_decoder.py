"""The picture decoder of Chameleon checkpoints: in the checkpoint, or in a file beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from mmaccel.errors import OptionError
from mmaccel.pipelines.checkpoint import Place
from mmaccel.pipelines.llamagen_files import load_tokenizer
from mmaccel.pipelines.weights_file import read_weights
from mmaccel.tokenizers_vq.taming import rename_taming
from mmaccel.tokenizers_vq.vqgan import VQGAN, VQGANConfig

INSIDE = "model.vqmodel."  # names of its tensors in a checkpoint begin so
_BESIDE = ("vqgan.ckpt", "vqgan.safetensors", "tokenizer/vqgan.ckpt")


def load_decoder(folder: Path, place: Place, shape: Any, grid: tuple[int, int]) -> VQGAN:
    """The VQGAN of a checkpoint.

    Args:
        folder: of the checkpoint.
        place: where it goes; `decoder` names a file that goes before what the folder has.
        shape: transformers' `ChameleonVQVAEConfig`.
        grid: rows and columns of the codes.

    Raises:
        OptionError: no weights of a picture decoder anywhere.
        UnsupportedModelError: weights that do not fit.
    """
    beside = [folder / name for name in _BESIDE if (folder / name).is_file()]
    if place.decoder is not None:
        weights = read_weights(place.decoder)
    elif beside:
        weights = read_weights(beside[0])
    else:
        weights = _read_inside(folder)
    if not any(name.startswith("decoder.") for name in weights):
        where = folder if place.decoder is None else place.decoder
        raise OptionError(
            f"decoder: expected weights of VQGAN's decoder, received none in {where}; "
            "name Chameleon's vqgan.ckpt with --decoder, or put it into the folder"
        )
    config = VQGANConfig(
        multipliers=tuple(shape.channel_multiplier),
        channels=shape.base_channels,
        z_channels=shape.latent_channels,
        n_codes=shape.num_embeddings,
        code_width=shape.embed_dim,
        is_normalised=False,
        attends=bool(shape.attn_resolutions),
        n_blocks=shape.num_res_blocks,
    )
    named = rename_taming(weights, len(config.multipliers))
    return load_tokenizer(named, grid, config).to(place.device)


def _read_inside(folder: Path) -> dict[str, Tensor]:
    """The tensors of the checkpoint's own `vqmodel`, if it has any."""
    from safetensors import safe_open

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                if name.startswith(INSIDE):
                    found[name.removeprefix(INSIDE)] = opened.get_tensor(name)
    for file in sorted(folder.glob("*.bin")) if not found else []:
        own = {n: t for n, t in read_weights(file).items() if n.startswith(INSIDE)}
        found |= {name.removeprefix(INSIDE): tensor for name, tensor in own.items()}
    return found
