"""`benchmarks.canvas`: its oracle keeps stepwise decoding's tokens and commits all that is right at
every pass, and its rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.canvas import SETUPS, Oracle, measure_text, sum_up
from mmaccel import Noise, SamplingParams, Stepwise
from mmaccel.catalog import read_policy
from mmaccel.contracts import Prompt
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.samplers.canvas.predictions import SlotPredictions
from scripts.training.grammar import describe
from scripts.training.grammar_tasks import MASK, TASKS
from tests.fixtures.joints import families

LENGTH, ROWS = 5, 40


def options() -> dict[str, object]:
    return {"params": SamplingParams(), "noise": Noise.from_seed(3, ROWS)}


def prompt() -> Prompt:
    ones = torch.ones(ROWS, dtype=torch.int64)
    return Prompt(0 * ones[:, None], ones)


@pytest.mark.parametrize("family", list(families(LENGTH, 3)))
def test_it_commits_what_is_right_and_nothing_else(family: str) -> None:
    model = ReferenceDenoiser(families(LENGTH, 3)[family])
    plain = Stepwise("confidence").sample(model, prompt(), LENGTH, **options())  # type: ignore[arg-type]
    oracle = Oracle(plain.tokens)
    run = oracle.open(model, prompt(), LENGTH, **options())
    seen: list[SlotPredictions] = []
    run.draws = lambda predictions: seen.append(predictions) or predictions  # type: ignore[func-returns-value]
    made = oracle.decode(run)
    assert torch.equal(made.tokens, plain.tokens)
    for row in range(ROWS):
        n_open = LENGTH
        for one in seen:
            is_open = one.is_open[row]
            n_before = int(is_open.sum())
            if not n_before:
                break
            assert n_before == n_open
            assert one.drawn is not None
            right = is_open & (one.drawn[row] == plain.tokens[row])
            n_open -= max(1, int(right.sum()))
        assert n_open == 0


@pytest.mark.slow
def test_rows_of_a_grammar(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=MASK + 1, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "words.json").write_text(json.dumps(describe()), encoding="utf-8")
    labels = ("stepwise", "lossless-unmask", "maskgit 12")
    policies = {label: read_policy(SETUPS[label]) for label in labels}
    plain, fast, relaxed = rows = list(measure_text(tmp_path, policies, 2, 0))
    n = 2 * len(TASKS)
    assert plain["rows"] == fast["rows"] == n and plain["same"] == fast["same"] == n
    assert fast["passes"] < plain["passes"] and fast["positions"] > plain["positions"]
    assert fast["quality"] == plain["quality"] and relaxed["same"] < n
    assert 0 <= plain["quality"]["right"] <= 1 and set(TASKS) < set(plain["quality"])
    assert sum_up([row | {"quality": {"right": 1.0}} for row in rows])[0]["aup"] == pytest.approx(
        100 * plain["tokens_per_pass"]
    )
