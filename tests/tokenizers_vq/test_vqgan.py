"""VQGAN: names and shapes of the published checkpoint, codes there and back."""

from __future__ import annotations

import pytest
import torch

from mmaccel.errors import NumericsError
from mmaccel.pipelines.models.llamagen.text_to_image import load_tokenizer
from mmaccel.tokenizers_vq.vqgan import VQGAN, VQGANConfig, rename_taming

SMALL = VQGANConfig(
    multipliers=(1, 2), channels=32, z_channels=16, n_codes=20, code_width=4, n_blocks=1
)
PUBLISHED = {  # vq_ds16_c2i.pt: some names of every kind, with their shapes
    "encoder.conv_in.weight": (128, 3, 3, 3),
    "encoder.conv_blocks.0.res.0.norm1.weight": (128,),
    "encoder.conv_blocks.2.res.0.nin_shortcut.weight": (256, 128, 1, 1),
    "encoder.conv_blocks.3.downsample.conv.weight": (256, 256, 3, 3),
    "encoder.conv_blocks.4.attn.1.proj_out.bias": (512,),
    "encoder.mid.1.q.weight": (512, 512, 1, 1),
    "encoder.norm_out.bias": (512,),
    "encoder.conv_out.weight": (256, 512, 3, 3),
    "decoder.conv_in.weight": (512, 256, 3, 3),
    "decoder.mid.2.conv2.weight": (512, 512, 3, 3),
    "decoder.conv_blocks.0.attn.2.v.weight": (512, 512, 1, 1),
    "decoder.conv_blocks.0.upsample.conv.weight": (512, 512, 3, 3),
    "decoder.conv_blocks.1.res.0.nin_shortcut.weight": (256, 512, 1, 1),
    "decoder.conv_blocks.4.res.2.conv1.weight": (128, 128, 3, 3),
    "decoder.conv_out.weight": (3, 128, 3, 3),
    "quantize.embedding.weight": (16384, 8),
    "quant_conv.weight": (8, 256, 1, 1),
    "post_quant_conv.weight": (256, 8, 1, 1),
}
COUNT = 71_883_403  # parameters: 72 M, as its paper says


def test_names_and_shapes_are_those_of_the_published_tokenizer() -> None:
    with torch.device("meta"):
        state = VQGAN(VQGANConfig()).state_dict()
    assert {name: tuple(state[name].shape) for name in PUBLISHED} == PUBLISHED
    assert not any("conv_blocks.0.downsample" in name for name in state if "decoder" in name)
    assert "encoder.conv_blocks.4.downsample.conv.weight" not in state
    assert "decoder.conv_blocks.4.upsample.conv.weight" not in state
    assert sum(tensor.numel() for tensor in state.values()) == COUNT


def small(seed: int = 0) -> VQGAN:
    torch.manual_seed(seed)
    return VQGAN(SMALL, (4, 6)).eval()


def test_codes_become_images_and_images_codes() -> None:
    tokenizer = small()
    tokens = torch.randint(20, (2, 24))
    images = tokenizer.decode(tokens)
    assert images.shape == (2, 3, 8, 12)
    assert 0 <= float(images.min()) <= float(images.max()) <= 1
    assert tokenizer.encode(images).shape == (2, 24)
    other = tokens.clone()
    other[0, 23] = (other[0, 23] + 1) % 20  # the last code is at the bottom right
    change = (tokenizer.decode(other) - images).abs().amax(1)
    assert float(change[1].max()) == 0 < float(change[0].max())
    list(tokenizer.decoder.parameters())[-1].data[0] = torch.inf
    with pytest.raises(NumericsError, match="received NaN or infinity from the codec"):
        tokenizer.decode(tokens)


@pytest.mark.parametrize("is_normalised", [True, False])
def test_a_feature_takes_the_nearest_code(is_normalised: bool) -> None:
    tokenizer = small()
    tokenizer.config = VQGANConfig(**(vars(SMALL) | {"is_normalised": is_normalised}))
    images = torch.rand(3, 3, 8, 12)
    with torch.no_grad():
        features = tokenizer.quant_conv(tokenizer.encoder(images * 2 - 1))
    codes = tokenizer.quantize["embedding"].weight.detach()
    for b in range(3):
        for at in range(24):
            feature = features[b, :, at // 6, at % 6].detach()
            if is_normalised:
                feature, codes = feature / feature.norm(), codes / codes.norm(dim=1, keepdim=True)
            nearest = int((codes - feature).square().sum(1).argmin())
            assert int(tokenizer.encode(images)[b, at]) == nearest


def test_a_published_file_has_a_tensor_that_nothing_reads() -> None:
    state = small().state_dict() | {"quantize.codebook_used": torch.zeros(65536)}
    again = load_tokenizer(state, (4, 6), SMALL)
    tokens = torch.randint(20, (1, 24))
    assert torch.equal(again.decode(tokens), small().decode(tokens))


TAMING = {  # Chameleon's vqgan.ckpt: names of every kind, and ours
    "encoder.down.0.block.1.conv2.weight": "encoder.conv_blocks.0.res.1.conv2.weight",
    "encoder.down.3.downsample.conv.bias": "encoder.conv_blocks.3.downsample.conv.bias",
    "encoder.mid.attn_1.q.weight": "encoder.mid.1.q.weight",
    "decoder.conv_in.weight": "decoder.conv_in.weight",
    "decoder.mid.block_1.norm1.weight": "decoder.mid.0.norm1.weight",
    "decoder.mid.block_2.norm1.weight": "decoder.mid.2.norm1.weight",
    "decoder.up.0.block.2.conv1.weight": "decoder.conv_blocks.4.res.2.conv1.weight",
    "decoder.up.3.block.0.nin_shortcut.weight": "decoder.conv_blocks.1.res.0.nin_shortcut.weight",
    "decoder.up.4.upsample.conv.weight": "decoder.conv_blocks.0.upsample.conv.weight",
    "decoder.up.4.attn.2.v.weight": "decoder.conv_blocks.0.attn.2.v.weight",
    "quantize.embedding.weight": "quantize.embedding.weight",
    "post_quant_conv.bias": "post_quant_conv.bias",
}


def test_taming_names_become_ours_and_losses_are_left_out() -> None:
    ours = VQGAN(VQGANConfig(multipliers=(1, 1, 2, 2, 4), channels=32)).state_dict()
    values = {name: torch.tensor(k) for k, name in enumerate(TAMING)}
    renamed = rename_taming(values | {"loss.logvar": torch.zeros(1)}, 5)
    assert {name: int(value) for name, value in renamed.items()} == {
        name: k for k, name in enumerate(TAMING.values())
    }
    assert set(TAMING.values()) <= set(ours)
