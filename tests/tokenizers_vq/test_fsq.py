"""Finite scalar quantization: codes by hand, every code occurs, straight-through gradients."""

from itertools import product

import pytest
import torch

from mmaccel.tokenizers_vq.fsq import FiniteScalarQuantizer


def test_codes_count_the_first_channel_fastest() -> None:
    quantizer = FiniteScalarQuantizer([5, 3])
    large = 50.0
    latent = torch.tensor([[-large, -large], [large, -large], [-large, 0.0], [0.0, large]])
    assert quantizer.encode(latent).tolist() == [0, 4, 5, 2 + 5 * 2]


@pytest.mark.parametrize("levels", [(5, 3), (8, 5), (2, 4, 3)])
def test_sweeping_the_latent_reaches_every_code_and_no_other(levels: tuple[int, ...]) -> None:
    quantizer = FiniteScalarQuantizer(levels)
    line = torch.linspace(-6, 6, 241)
    latent = torch.tensor(list(product(line.tolist(), repeat=2)))
    latent = torch.cat([latent, latent[:, :1].roll(77, 0)], 1)[:, : len(levels)]
    seen = set(quantizer.encode(latent).tolist())
    assert seen <= set(range(quantizer.vocab_size))
    if len(levels) == 2:
        assert seen == set(range(quantizer.vocab_size))


def test_decode_gives_evenly_spaced_levels_between_minus_one_and_one() -> None:
    odd = FiniteScalarQuantizer([5]).decode(torch.arange(5))[:, 0]
    assert odd.tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]
    even = FiniteScalarQuantizer([4]).decode(torch.arange(4))[:, 0]
    assert even.tolist() == [-1.0, -0.5, 0.0, 0.5]


def test_forward_equals_decode_of_encode_and_every_code_survives_the_round_trip() -> None:
    torch.manual_seed(0)
    quantizer = FiniteScalarQuantizer([8, 5, 5, 5])
    latent = torch.randn(7, 3, 4) * 2
    assert torch.allclose(quantizer(latent), quantizer.decode(quantizer.encode(latent)), atol=1e-6)
    tokens = torch.arange(1000)
    digits = quantizer.decode(tokens)
    again = sum(
        ((digits[:, d] * (n // 2)).round().long() + n // 2) * stride
        for d, (n, stride) in enumerate(zip((8, 5, 5, 5), (1, 8, 40, 200), strict=True))
    )
    assert torch.equal(again, tokens)


def test_gradient_passes_through_the_rounding() -> None:
    quantizer = FiniteScalarQuantizer([5])
    latent = torch.tensor([[0.3]], requires_grad=True)
    quantizer(latent).sum().backward()
    half = 4 * 1.001 / 2
    slope = half * (1 - torch.tanh(torch.tensor(0.3)) ** 2) / 2  # of half * tanh(z) / 2
    assert latent.grad is not None
    assert torch.allclose(latent.grad[0, 0], slope, rtol=1e-5)
