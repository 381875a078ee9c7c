"""Baselines of `mmaccel evaluate speed`: transformers' generate makes the same tokens, counted the
same way; a baseline that cannot run is reported; results before an error are saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel import Autoregressive, TextToImage
from mmaccel.cli import main
from mmaccel.evaluation import transformers_baseline as baseline_decoding
from mmaccel.evaluation.transformers_baseline import (
    BASELINES,
    BaselineDecoding,
    find_obstacle,
)
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS

pytestmark = pytest.mark.slow

SEEDS = [3, 4, 5]


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced, and run as they are: the same shapes and counts in a second."""
    monkeypatch.setattr(baseline_decoding, "BACKEND", "eager")


@pytest.mark.parametrize("name", ["transformers", "static", "compiled"])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"guidance_scale": 1.0}, {"top_k": 5, "temperature": 0.7}],
    ids=str,
)
def test_tokens_and_counts_are_those_of_the_plain_loop(
    pipe: TextToImage, name: str, options: dict[str, Any]
) -> None:
    params = replace(pipe.image_model.params, **options)
    plain = pipe(CAPTIONS, policy=Autoregressive(), seed=SEEDS, **options)
    decoding = BaselineDecoding(pipe, name, CAPTIONS)
    before = set(vars(pipe.model.model))
    (made,) = decoding.stream(CAPTIONS, params, seed=SEEDS, batch_size=3)
    assert torch.equal(made.tokens, plain.tokens) and made.prompts == CAPTIONS
    assert made.images[2].tobytes() == plain.images[2].tobytes()
    for field in ("tokens", "passes", "row_passes", "accepted", "branches"):
        assert getattr(made.stats, field) == getattr(plain.stats, field), field
    assert made.stats.passes == N_TOKENS and made.passes.tolist() == [N_TOKENS] * 3
    assert 0 < made.stats.forward_seconds < made.stats.seconds
    assert (made.stats.captures > 0) == (name == "compiled")
    if name == "compiled":  # other captions and seeds: the same graphs
        other = [CAPTIONS[0], CAPTIONS[2], CAPTIONS[2]]  # not the longest: shapes stay
        (again,) = decoding.stream(other, params, seed=[7, 8, 9], batch_size=3)
        assert again.stats.captures == 0
        wanted = pipe(other, policy=Autoregressive(), seed=[7, 8, 9], **options).tokens
        assert torch.equal(again.tokens, wanted)
    decoding.close()
    assert set(vars(pipe.model.model)) == before


def test_drafts_make_the_same_tokens_in_fewer_passes(tiny_folder: Path) -> None:
    pipe = TextToImage.from_pretrained(tiny_folder)
    with torch.no_grad():  # one token over and over, so that looking up the last ones finds drafts
        pipe.model.model.get_output_embeddings().weight.zero_()
    params = replace(pipe.image_model.params, guidance_scale=1.0, temperature=0.0)
    assert find_obstacle(pipe, "prompt-lookup", CAPTIONS[0], params) == ""
    decoding = BaselineDecoding(pipe, "prompt-lookup", CAPTIONS)
    before = set(vars(pipe.model.model))
    tokens, stats = decoding.decode(CAPTIONS, params, SEEDS, N_TOKENS)
    decoding.close()
    assert set(vars(pipe.model.model)) == before
    plain = pipe(CAPTIONS, policy=Autoregressive(), seed=SEEDS, guidance_scale=1.0, temperature=0.0)
    assert torch.equal(tokens, plain.tokens)
    assert 3 < stats.passes < 2 * N_TOKENS and stats.tokens == 3 * N_TOKENS


def test_the_obstacle_of_a_baseline_is_reported(
    pipe: TextToImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = pipe.image_model.params
    reasons = [find_obstacle(pipe, name, CAPTIONS[0], params) for name in BASELINES]
    assert reasons[:3] == [""] * 3
    assert reasons[3].startswith("transformers' assisted decoding takes one sequence")
    other: Any = SimpleNamespace(image_model=object(), model=pipe.model)
    assert "makes no images of object" in find_obstacle(other, "static", CAPTIONS[0], params)
    with_processor = SamplingParams(processor=lambda scores, line, columns: scores)
    assert "processor" in find_obstacle(pipe, "static", CAPTIONS[0], with_processor)
    monkeypatch.setattr(baseline_decoding, "BACKEND", "no such backend")
    reason = find_obstacle(pipe, "compiled", CAPTIONS[0], params)
    assert reason.startswith("torch.compile does not work here (") and "no such backend" in reason
    assert find_obstacle(pipe, "static", CAPTIONS[0], params) == ""

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("a cache of fixed size is not supported")

    monkeypatch.setattr(type(pipe.model.model), "generate", broken)
    reason = find_obstacle(pipe, "static", CAPTIONS[0], params)
    assert "ValueError: a cache of fixed size" in reason


def test_a_baseline_that_cannot_run_is_left_out_with_its_reason(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(baseline_decoding, "BACKEND", "no such backend")
    monkeypatch.setattr("mmaccel.evaluation.speed.LEAST_RUNS", 1)
    options = "--batch-sizes 1 --baseline compiled --runs 1 --out".split()
    assert main(["evaluate", "speed", str(tiny_folder), *options, str(tmp_path / "s")]) == 0
    said = capsys.readouterr()
    assert "--baseline compiled is left out: torch.compile does not work" in said.err
    report = json.loads((tmp_path / "s" / "speed.json").read_text())
    assert "no such backend" in report["left_out"]["compiled"] and report["baselines"] == []
    assert [row["side"] for row in report["rows"]] == ["plain", "policy"]
