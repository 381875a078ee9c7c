"""VAR: the published names, logits and images as published, other files refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmaccel import TextToImage
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.next_scale.network import NextScaleConfig
from mmaccel.pipelines.models.var import load_tokenizer
from mmaccel.tokenizers_vq.multi_scale_vqgan import MultiScaleVQGAN
from mmaccel.tokenizers_vq.vqgan import VQGANConfig
from tests.fixtures.var import (
    CODE,
    LENGTHS,
    LEVEL,
    N_CLASSES,
    N_CODES,
    SIDES,
    Blocks,
    build_vae,
    build_var,
    find_logits,
    likeliest,
    read_shapes,
    save_var,
    to_published,
)

# vae_ch160v4096z32.pth: some names of every kind, with their shapes
PUBLISHED = """
encoder.conv_in.weight 160 3 3 3 | encoder.down.3.downsample.conv.weight 320 320 3 3
encoder.down.4.block.0.nin_shortcut.weight 640 320 1 1
encoder.down.4.attn.1.qkv.weight 1920 640 1 1
encoder.mid.attn_1.qkv.bias 1920 | encoder.conv_out.weight 32 640 3 3
decoder.conv_in.weight 640 32 3 3 | decoder.up.0.block.2.norm1.weight 160
decoder.up.3.block.0.nin_shortcut.weight 320 640 1 1
decoder.up.4.attn.1.proj_out.weight 640 640 1 1 | decoder.up.4.upsample.conv.weight 640 640 3 3
quantize.quant_resi.qresi_ls.3.weight 32 32 3 3 | quantize.embedding.weight 4096 32
post_quant_conv.weight 32 32 3 3
"""
COUNT = 108_948_355  # its numbers


def open_var(folder: Path, **changes: dict[str, torch.Tensor]) -> TextToImage:
    return TextToImage.from_pretrained(save_var(folder, **changes), dtype="fp32", device="cpu")


def test_names_and_shapes_are_those_of_the_published_tokenizer() -> None:
    sizes = VQGANConfig(channels=160, z_channels=32, n_codes=4096, code_width=32, code_kernel=3)
    with torch.device("meta"):
        state = to_published(MultiScaleVQGAN(sizes, (1, 2)).state_dict())
    for name, shape in read_shapes(PUBLISHED).items():
        assert tuple(state[name].shape) == shape, name
    state.pop("quantize.ema_vocab_hit_SV")
    assert sum(tensor.numel() for tensor in state.values()) == COUNT


def test_codes_are_read_as_published() -> None:
    """Of latents they are those of a `MultiScaleQuantizer`."""
    vae = build_vae()
    network = NextScaleConfig(sides=SIDES, n_codes=N_CODES, code_width=CODE)
    tokenizer = load_tokenizer(vae, network)
    again = to_published(tokenizer.state_dict())
    assert all(torch.equal(again[name], tensor) for name, tensor in vae.items())
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        latents = tokenizer.quant_conv(tokenizer.encoder(images * 2 - 1))
    codes = tokenizer.encode(images)
    assert len(codes.unique()) > 3
    assert torch.equal(codes, tokenizer.quantize.encode(latents))


@pytest.mark.parametrize(("is_shared", "has_unit_keys"), [(False, True), (True, False)])
def test_logits_are_as_published(tmp_path: Path, is_shared: bool, has_unit_keys: bool) -> None:
    weights = build_var(is_shared, has_unit_keys)
    network = open_var(tmp_path, weights=weights).prompted_model.window.model
    labels = torch.tensor([3, 5])
    sums = torch.randn(2, sum(LENGTHS) - 1, CODE, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = network(labels[:, None], torch.ones(2, 1, dtype=torch.bool), sums)
    expected = find_logits(Blocks(weights, LEVEL), labels, sums)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_tokens_are_drawn_as_published(tmp_path: Path) -> None:
    weights = build_var()
    pipe = open_var(tmp_path, weights=weights)
    made = pipe(["3", "1"], temperature=0.0, top_k=None, top_p=None, seed=[1, 2])
    assert made.stats.passes == len(SIDES)
    assert len(made.tokens.unique()) > 3
    blocks, window = Blocks(weights, LEVEL), pipe.prompted_model.window
    for label, tokens in zip((3, 1), made.tokens, strict=True):
        sums = window._sums(tokens[None])
        assert torch.equal(tokens, likeliest(blocks, label, N_CLASSES, sums, cfg=1.5))
        assert not torch.equal(tokens, likeliest(blocks, label, N_CLASSES, sums, cfg=0.0))


def test_other_files_are_refused(tmp_path: Path) -> None:
    pipe = open_var(tmp_path)
    with pytest.raises(OptionError, match=r"prompt: expected the number of a class, 0\.\.4"):
        pipe("5")
    with pytest.raises(OptionError, match="received '99999999"):
        pipe("9" * 5000)
    vae = build_vae()
    vae["quantize.embedding.weight"] = torch.zeros(N_CODES + 1, CODE)
    with pytest.raises(UnsupportedModelError, match="expected a tokenizer of 12 codes of width 6"):
        open_var(tmp_path, vae=vae)
    weights = build_var()
    with pytest.raises(UnsupportedModelError, match="lvl_1L"):
        open_var(tmp_path, weights={k: v for k, v in weights.items() if k != "lvl_1L"})
    weights["pos_1LC"] = weights["pos_1LC"][:, 1:]
    with pytest.raises(UnsupportedModelError, match="pos_1LC"):
        open_var(tmp_path, weights=weights)
    (save_var(tmp_path) / "vae_ch160v4096z32.pth").unlink()
    with pytest.raises(OptionError, match="VAR's tokenizer"):
        TextToImage.from_pretrained(tmp_path)
