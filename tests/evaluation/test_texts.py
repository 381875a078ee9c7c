"""`evaluate exactness` of a causal LM, on `stdlib`."""

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
