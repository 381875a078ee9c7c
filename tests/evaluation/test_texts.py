"""`evaluate exactness` and `evaluate speed` of a causal LM, on `stdlib`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import Autoregressive, Jacobi
from mmaccel.cli import main
from mmaccel.evaluation.texts import open_texts
from mmaccel.evaluation.transformers_baseline import BaselineDecoding
from mmaccel.pipelines.pipeline import read_loading
from mmaccel.results import Generation
from mmaccel.samplers.sampling_params import SamplingParams
from scripts.training.loop import WEIGHTS

PROMPTS = ["import os, sys, re, os, sys, re, os,", "def f(x):", "x = [1, 2, 3, 1, 2, 3, 1, 2,"]
N_TOKENS = 12
STDLIB = WEIGHTS / "stdlib"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return [str(STDLIB), "--prompts", str(file), "--max-new-tokens", str(N_TOKENS)]


def check(arguments: list[str], *more: object) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of `evaluate exactness`, and its checks."""
    file = Path(arguments[2]).with_name("checks.json")
    options = ["--samples", 0, "--batch-size", 3, "--json", file, *more]
    code = main(["evaluate", "exactness", *arguments, *map(str, options)])
    return code, json.loads(file.read_text())["checks"]


@pytest.mark.slow
def test_no_token_differs(arguments: list[str]) -> None:
    code, checks = check(arguments)
    names = ["greedy", "greedy, transformers' generate", "same seeds", "plain loop in batches"]
    names = [*names, "policy in batches"]
    assert code == 0 and [each["name"] for each in checks] == names * 2
    figures = [each["figures"] for each in checks if each["guaranteed"]]
    assert len(figures) == 4 + 2  # bitwise, and where speculation is greedy
    assert all(each["same"] == each["rows"] == 3 for each in figures)
    assert checks[0]["policy"].startswith("Jacobi") and "ngram" in checks[-1]["policy"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["policy", "library"])
def test_a_wrong_token_is_found_where_it_stands(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner, name = (Jacobi, "sample") if place == "policy" else (BaselineDecoding, "decode")
    own: Any = getattr(owner, name)

    def alter(*given: Any, **options: Any) -> Any:
        made = own(*given, **options)
        tokens = made.tokens if isinstance(made, Generation) else made[0]
        tokens[1:2, 5] = (tokens[1:2, 5] + 1) % 2048
        return made

    monkeypatch.setattr(owner, name, alter)
    code, checks = check(arguments, "--policy", "jacobi", "--window", 4)
    broken = [each for each in checks if each["is_broken"]]
    assert code == 3 and len(broken) == (4 if place == "policy" else 1)
    found = {each["name"]: each["figures"] for each in broken}["greedy, transformers' generate"]
    assert found["first_divergence"] == [None, 5, None]
    (parting,) = found["partings"]
    assert parting["gap"] > 1000 * parting["rounding"] and not parting["is_rounding"]


@pytest.mark.slow
def test_rows_of_the_speed_report(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmaccel.evaluation.speed.LEAST_RUNS", 3)
    options = ["--runs", 3, "--warm-up", 1, "--batch-sizes", "1,3", "--window", 4]
    options += ["--drafts", "ngram"]
    options += ["--baseline", "transformers", "--baseline", "prompt-lookup", "--out", tmp_path]
    assert main(["evaluate", "speed", *arguments, *map(str, options)]) == 0
    report = json.loads((tmp_path / "speed.json").read_text())
    assert report["max_new_tokens"] == N_TOKENS and report["temperature"] == 0
    rows = {(row["side"], row["batch_size"]): row for row in report["rows"]}
    assert len(rows) == 4 * 2
    for (side, size), row in rows.items():
        made = row["tokens_per_second"] * row["seconds"]["median"]
        assert made == pytest.approx(N_TOKENS * size)
        if side in ("plain", "transformers"):
            assert row["passes"] == N_TOKENS and row["tokens_per_pass"] == 1
        else:
            assert row["row_passes"] < N_TOKENS  # drafts were accepted


def test_texts_end_where_the_model_ends_them() -> None:
    pipe = open_texts(STDLIB, *read_loading({"dtype": "float32"}), N_TOKENS)
    greedy = SamplingParams(temperature=0.0)
    options: dict[str, Any] = {"seed": [0, 1, 2], "batch_size": 3}
    (whole,) = pipe.stream(PROMPTS, greedy, policy=Autoregressive(), **options)
    end = int(whole.tokens[1, 4])
    host: Any = pipe.host
    host.ends = host.window.model.generation_config.eos_token_id = [end]
    made = [*pipe.stream(PROMPTS, greedy, policy=Autoregressive(), **options)]
    made += pipe.stream(PROMPTS, greedy, policy=Jacobi(4), **options)
    for name in ("transformers", "prompt-lookup"):
        made += BaselineDecoding(pipe, name, PROMPTS).stream(PROMPTS, greedy, **options)
    assert made[0].stats.tokens < 3 * N_TOKENS and not made[0].tokens[1, 5:].any()
    for other in made[1:]:
        assert torch.equal(other.tokens, made[0].tokens)
        assert other.stats.tokens == made[0].stats.tokens
    assert made[2].stats.row_passes == made[0].stats.row_passes
