"""Coarse drafts: tokens of the plain loop, whatever the coarse model says."""

from __future__ import annotations

import pytest
import torch

import mmaccel
from tests.fixtures.coarse import bad_coarse

GRID = {"columns": 16, "frame": 256, "n_slots": 256}


@pytest.fixture(scope="module")
def pipe():
    return mmaccel.TextToImage.from_pretrained("scenes")


def make_folder(pipe, folder, kind):
    """A coarse model of random, constant, huge or zero weights."""
    return bad_coarse(pipe.model.output_matrix(), folder, kind, **GRID)


@pytest.mark.parametrize("kind", ["random", "constant", "adversarial"])
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_any_coarse_model_leaves_the_tokens_as_they_are(pipe, tmp_path, kind, guidance):
    source = make_folder(pipe, tmp_path, kind)
    captions = ["a red circle above a small blue square on grass"] * 2
    options = {"guidance_scale": guidance, "seed": [1, 2]}
    plain = pipe(captions, policy=mmaccel.Jacobi(24, "neighbour"), **options)
    coarse = pipe(captions, policy=mmaccel.Jacobi(24, source), **options)
    assert torch.equal(plain.tokens, coarse.tokens)
    assert coarse.stats.passes != plain.stats.passes


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_a_coarse_model_of_zeros_makes_the_passes_of_the_neighbour_source(pipe, tmp_path, guidance):
    source = make_folder(pipe, tmp_path, "zeros")
    options = {"guidance_scale": guidance, "seed": [1, 2]}
    captions = ["a red circle above a small blue square on grass"] * 2
    plain = pipe(captions, policy=mmaccel.Jacobi(24, "neighbour"), **options)
    coarse = pipe(captions, policy=mmaccel.Jacobi(24, source), **options)
    assert torch.equal(plain.tokens, coarse.tokens)
    assert coarse.stats.accepted == plain.stats.accepted
