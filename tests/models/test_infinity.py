"""Infinity: the published names, logits by hand, bits as tokens, and what is refused."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange
from torch.nn import functional as F

import mmaccel
from mmaccel import TextToImage
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.loading.sources import content_hash
from mmaccel.pipelines.models.infinity import find_scales, load_network
from mmaccel.samplers.canvas import fast_var
from mmaccel.tokenizers_vq.bitwise import BitwiseQuantizer
from tests.fixtures.checkpoints import CAPTIONS, SIZES
from tests.fixtures.infinity import BITS, draw_weights, logits_of, shapes

SIDES, SIZE = [1, 2, 4, 6], SIZES["infinity"]
POOL = "text_proj_for_sos.ca"
Builder = Callable[[str], Path]


@pytest.fixture(scope="module")
def pipe(built: Builder) -> TextToImage:
    return TextToImage.from_pretrained(built("infinity"), size=SIZE)


@torch.no_grad()
def test_logits_are_those_of_the_published_network(pipe: TextToImage) -> None:
    """Scale by scale and all at once. Where a scale sees the next one, or the bits of an entry have
    another order, logits differ.
    """
    source: Any = pipe.resize((96, 96)).image_model
    model = source.window
    bits = torch.randint(2, (2, sum(model.lengths)), generator=torch.Generator().manual_seed(1))
    said = [source.encode(text) for text in CAPTIONS[:2]]
    prompt = source.prompt(said, True)
    weights, texts = draw_weights(), [source.encoder(torch.tensor([ids]))[0][0] for ids in said]
    texts += [weights["cfg_uncond"][: len(ids)] for ids in said]
    model.reserve(4, 0)
    model.begin(prompt)
    parts = [None, *bits.split(model.lengths, 1)]
    made = [model.forward_scale(scale, parts[scale], None, None)[0] for scale in range(4)]
    told, is_real = model.tell(model._ids, model._is_real)
    whole = model.model(told, is_real, model._sums(bits).repeat(2, 1, 1))
    for row, features in enumerate(texts):
        expected = logits_of(weights, features, bits[row % 2], SIDES, 64)
        for ours in (torch.cat(made, 1)[row], whole[row]):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
        for bug in ("future", "order"):
            other = logits_of(weights, features, bits[row % 2], SIDES, 64, bug)
            assert (other - expected).abs().max() > 0.01, bug


def test_a_pass_draws_the_bits_of_a_scale(pipe: TextToImage) -> None:
    made = pipe(CAPTIONS, seed=[1, 2, 3], negative_prompt=[None, "blue", None])
    assert made.tokens.unique().tolist() == [0, 1] and made.stats.row_passes == 9
    assert made.stats.positions == 3 * 2 * 21 and [i.size for i in made.images] == [SIZE] * 3
    assert not made.tokens[1].equal(pipe(CAPTIONS[1], seed=2).tokens[0])
    wide = pipe.resize((64, 48))(CAPTIONS[0], seed=1)
    assert wide.images[0].size == (64, 48) and pipe.size == SIZE
    assert wide.tokens.shape == (1, (1 + 4 + 12) * BITS)


@pytest.mark.parametrize("size", [(64, 80), (160, 80)])
def test_reductions_of_images_that_are_no_squares(
    pipe: TextToImage, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: set[Any] = set()
    fill = fast_var.resize
    monkeypatch.setattr(fast_var, "resize", lambda x, *two: grids.add(two) or fill(x, *two))
    resized = pipe.resize(size)
    scales = find_scales(size)[0]
    h, w = scales[-1]
    made = resized(CAPTIONS, seed=[1, 2, 3], policy=mmaccel.FastVAR((0.5,)))
    counts = [rows * columns for rows, columns in scales[:-1]]
    assert made.stats.positions == 3 * 2 * (sum(counts) + math.ceil(h * w / 2))
    assert grids == {scales[-2:]}
    method = mmaccel.ScaleKV(budget=8, window=4)
    cut = resized(CAPTIONS, seed=[1, 2, 3], kv_cache=method)
    assert cut.stats.exactness == "relaxed"
    for row, text in enumerate(CAPTIONS):
        alone = resized(text, seed=row + 1, kv_cache=method)
        assert alone.tokens[0].equal(cut.tokens[row])
        alone = resized(text, seed=row + 1, policy=mmaccel.FastVAR((0.5,)))
        assert alone.tokens[0].equal(made.tokens[row])


def test_a_size_after_offloading_is_drawn_by_its_own_network(pipe: TextToImage) -> None:
    """accelerate's hook gives a network a `forward` of its own, which copies must not have."""
    accelerate = pytest.importorskip("accelerate")
    policy = mmaccel.LosslessUnmask()
    expected = pipe.resize((48, 64))("blue cat", seed=1, policy=policy).tokens
    network = pipe.image_model.window.model
    accelerate.cpu_offload_with_hook(network, torch.device("cpu"))
    made = pipe.resize((48, 64))("blue cat", seed=1, policy=policy).tokens
    accelerate.hooks.remove_hook_from_module(network)
    assert made.equal(expected)


@pytest.mark.parametrize("patch", [1, 2])
def test_bits_are_signs_of_what_is_left(patch: int) -> None:
    grids = ((1, 1), (2, 3), (4, 6))
    quantizer = BitwiseQuantizer(grids, 3, patch)
    latents = torch.randn(2, 3, 4 * patch, 6 * patch, generator=torch.Generator().manual_seed(2))
    rest, expected = latents[:, :, None], []
    for h, w in grids:
        size = (1, h * patch, w * patch)
        signs = F.interpolate(rest, size=size, mode="area") > 0
        order = "b c 1 (h i) (w j) -> b (h w c i j)"
        expected.append(rearrange(signs, order, i=patch, j=patch).long())
        vectors = (signs * 2.0 - 1) / math.sqrt(3)
        rest = rest - F.interpolate(vectors, size=rest.shape[2:], mode="trilinear")
    bits = quantizer.encode(latents)
    assert bits.equal(torch.cat(expected, 1))
    torch.testing.assert_close(quantizer.decode(bits), latents - rest[:, :, 0])


def test_published_sizes() -> None:
    named = shapes(8, 5, W=3584, H=28, P=16, p=224, F=2048, T=512, D=56)
    with torch.device("meta"):
        weights = {name: torch.empty(shape) for name, shape in named.items()}
    scales, whole = find_scales((1024, 1024))
    network = load_network(weights, scales, whole, 32128)
    assert round(sum(each.numel() for each in network.parameters()) / 1e9, 2) == 8.38
    assert sum(network.lengths) == 10521 and find_scales((512, 512)) == (scales[:10], whole)
    (*_, last), whole = find_scales((672, 384))
    assert (last, whole) == ((24, 42), (48, 84))
    for size in ((1024, 768), (48, 48)):
        with pytest.raises(OptionError, match="size: expected .*, received .*; take"):
            find_scales(size)


def test_other_files_are_refused(built: Builder, tmp_path: Path) -> None:
    folder = shutil.copytree(built("infinity"), tmp_path / "infinity")
    (file, vae) = (folder / name for name in ("infinity_2b_reg.pth", "infinity_vae_d32reg.pth"))

    def refuse(message: str, changed: dict[str, tuple[int, ...]], path: Path = file) -> None:
        content = torch.load(path)
        tensors = {name: torch.ones(shape) for name, shape in changed.items()}
        torch.save(content | tensors if path == file else {"vae": tensors}, path)
        with pytest.raises((UnsupportedModelError, OptionError), match=message) as raised:
            TextToImage.from_pretrained(folder, size=SIZE)
        assert "\n" not in str(raised.value)
        torch.save(content, path)

    refuse("Unexpected key.*norm0_ve", {"norm0_ve.weight": (3,)})
    five = {"word_embed.weight": (16, 5), "head.weight": (10, 16), "head.bias": (10,)}
    refuse("tokenizer of 5 bits.*one of 3", five)
    narrow = {"cfg_uncond": (8, 12), "text_norm.weight": (12,)}
    narrow |= {"text_proj_for_ca.0.weight": (16, 12), f"{POOL}.mat_kv.weight": (32, 12)}
    refuse("T5 of width 12, received one of 16", narrow)
    refuse("encoder.conv_in.weight", {"decoder.up.0.block.0": (1,)}, vae)
    before, content = content_hash(file), vae.read_bytes()
    vae.write_bytes(content + b" ")
    assert content_hash(file) != before
    vae.write_bytes(content)
    shutil.copy(file, folder / "infinity_125M_256x256.pth")
    with pytest.raises(OptionError, match=re.escape("['infinity_125M_256x256.pth', 'infinity_2b")):
        TextToImage.from_pretrained(folder)
    parts = folder / "infinity_8b_weights"
    parts.mkdir()
    weights = list(torch.load(file).items())
    for number in range(2):
        torch.save(dict(weights[number::2]), parts / f"model-{number}.bin")
    one, other = (TextToImage.from_pretrained(each, size=SIZE) for each in (file, parts))
    assert one("blue cat", seed=1).tokens.equal(other("blue cat", seed=1).tokens)
