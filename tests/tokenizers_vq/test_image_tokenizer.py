"""The image tokenizer: shapes, raster order, locality, files."""

from pathlib import Path

import pytest
import torch

from mmaccel.tokenizers_vq.autoencoder import (
    ImageTokenizer,
    ImageTokenizerConfig,
    ResidualBlock,
    load_tokenizer,
    save_tokenizer,
)

SMALL = {
    "size": 16,
    "levels": [5, 3],
    "encoder_width": 8,
    "encoder_depth": 0,
    "decoder_width": 8,
    "decoder_depth": 1,
    "fine_width": 8,
    "fine_depth": 1,
}


@pytest.fixture
def tokenizer() -> ImageTokenizer:
    torch.manual_seed(0)
    return ImageTokenizer(ImageTokenizerConfig(**SMALL)).eval()


def test_shapes_types_and_ranges(tokenizer: ImageTokenizer) -> None:
    tokens = tokenizer.encode(torch.rand(3, 3, 16, 16))
    assert tokens.shape == (3, 16) and tokens.dtype == torch.int64
    assert tokenizer.grid == (4, 4) and tokenizer.vocab_size == 15
    images = tokenizer.decode(tokens)
    assert images.shape == (3, 3, 16, 16)
    assert 0 <= images.min() and images.max() <= 1


def test_tokens_lie_in_raster_order(tokenizer: ImageTokenizer) -> None:
    """A change to one token moves the image around that token and nowhere else.

    Two convolutions remain once group normalisation, which depends on the whole image, is
    removed: they extend over at most two tokens.
    """
    tokenizer.decoder = torch.nn.Sequential(
        *(
            part
            for part in tokenizer.decoder
            if not isinstance(part, ResidualBlock | torch.nn.GroupNorm)
        )
    )
    base = torch.zeros(1, 16, dtype=torch.int64)
    for position, rows, columns in ((0, (0, 3), (0, 3)), (3, (0, 3), (1, 4)), (12, (1, 4), (0, 3))):
        other = base.clone()
        other[0, position] = 14
        moved = (tokenizer.decode(other) - tokenizer.decode(base)).abs().sum(1)[0]
        expected = torch.zeros(4, 4, dtype=torch.bool)
        expected[rows[0] : rows[1], columns[0] : columns[1]] = True
        assert torch.equal(moved.reshape(4, 4, 4, 4).sum((1, 3)) > 0, expected)


def test_encoding_does_not_depend_on_the_batch(tokenizer: ImageTokenizer) -> None:
    images = torch.rand(4, 3, 16, 16)
    alone = torch.cat([tokenizer.encode(p[None]) for p in images])
    assert torch.equal(alone, tokenizer.encode(images))


def test_files_build_the_same_tokenizer(tokenizer: ImageTokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path / "saved", torch.float32)
    again = load_tokenizer(tmp_path / "saved")
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(again.encode(images), tokenizer.encode(images))
    assert not again.training and all(not p.requires_grad for p in again.parameters())
