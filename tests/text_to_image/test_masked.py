"""Images from a masked demo model: loading, canvas policies, and the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import mmaccel
from mmaccel import TextToImage
from mmaccel.cli import main
from mmaccel.pipelines.hosts.diffusion_lm.masked_lm import MaskedLM
from mmaccel.pipelines.hosts.loading.sources import content_hash
from tests.fixtures.tiny_model import CAPTIONS, N_CODES, N_TOKENS, WORDS, masked_beside_plain

MASK = N_CODES + 3 + len(WORDS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    masked_beside_plain(folder)
    return folder


@pytest.fixture(scope="module")
def pipe(folders: Path) -> TextToImage:
    return TextToImage.from_pretrained(folders / "masked")


def test_a_folder_with_a_mask_opens_as_a_denoiser(pipe: TextToImage) -> None:
    assert isinstance(pipe.model, MaskedLM)
    assert (pipe.model.mask_token, pipe.model.shift, pipe.model.vocab_size) == (MASK, 1, N_CODES)
    assert pipe.length == N_TOKENS


def test_images_of_a_batch_are_those_made_alone(pipe: TextToImage) -> None:
    plain = pipe(CAPTIONS, policy=mmaccel.Stepwise("halton"), seed=[5, 6, 7])
    assert plain.tokens.shape == (3, N_TOKENS) and int(plain.tokens.max()) < N_CODES
    assert plain.stats.passes == N_TOKENS and plain.stats.branches == 2
    default = pipe(CAPTIONS, seed=[5, 6, 7])
    assert default.stats.policy.startswith("LosslessUnmask(")
    assert default.stats.passes < N_TOKENS and torch.equal(default.tokens, plain.tokens)
    alone = pipe(CAPTIONS[2], seed=[7], policy=mmaccel.LosslessUnmask(5, "halton", cache="none"))
    assert torch.equal(alone.tokens[0], plain.tokens[2])
    again = pipe(CAPTIONS, seed=[5, 6, 7], batch_size=2)
    assert torch.equal(again.tokens, plain.tokens)


def test_the_content_hash_includes_the_sibling_tokenizer(folders: Path, tmp_path: Path) -> None:
    copy = tmp_path / "models"
    shutil.copytree(folders, copy)
    before = content_hash(copy / "masked")
    assert before == content_hash(folders / "masked")
    file = copy / "plain" / "tokenizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert content_hash(copy / "masked") != before


def test_generate_compares_with_one_slot_per_pass(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = ["--model", str(folders / "masked"), "--out", str(tmp_path), "--seed", "0"]
    assert main(["generate", CAPTIONS[0], "--compare", *fixed]) == 0
    said = capsys.readouterr().out
    assert "The same image, token for token" in said and "lossless-unmask" in said
    assert len(list(tmp_path.glob("compare-*.png"))) == 1
