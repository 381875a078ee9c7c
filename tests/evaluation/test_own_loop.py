"""A caller's own loop against a reference: exact ones pass, biased ones are found out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmaccel.cli import main
from mmaccel.errors import OptionError
from mmaccel.evaluation.exactness.own_loop import compare_loops, count_cells, cut, draw_by
from tests.fixtures.tiny_lms import build_lm

LOOPS = '''
import numpy as np

def table(prompt, prefix):
    """Chances of a token of five, by all that stands before it."""
    text = f"{prompt}{prefix}".encode()
    logits = np.random.default_rng(list(text)).normal(size=5) * 1.5
    return logits

def sample(prompt, seed, temperature=1.0):
    rng, tokens = np.random.default_rng([7, seed]), []
    while len(tokens) < 3:
        scores = table(prompt, tokens) / temperature
        tokens.append(int((scores + rng.gumbel(size=5)).argmax()))
        if tokens[-1] == 4:
            break
    return tokens

def speculative(prompt, seed):
    """Rejection against uniform drafts: another way to the same distribution."""
    rng, tokens = np.random.default_rng([8, seed]), []
    while len(tokens) < 3 and 4 not in tokens:
        chances = np.exp(table(prompt, tokens))
        chances /= chances.sum()
        draft = rng.integers(5)
        if rng.random() < min(1, chances[draft] * 5):
            tokens.append(int(draft))
        else:
            rest = np.maximum(chances - 0.2, 0)
            tokens.append(int(rng.choice(5, p=rest / rest.sum())))
    return np.array([tokens])

def greedy_rejection(prompt, seed):
    """The same, but what is rejected is drawn from the whole distribution: a common mistake."""
    rng, tokens = np.random.default_rng([8, seed]), []
    while len(tokens) < 3 and 4 not in tokens:
        chances = np.exp(table(prompt, tokens))
        chances /= chances.sum()
        draft = rng.integers(5)
        is_kept = rng.random() < min(1, chances[draft] * 5)
        tokens.append(int(draft if is_kept else rng.choice(5, p=chances)))
    return tokens

def cold(prompt, seed):
    return sample(prompt, seed, 0.8)

def broken(prompt, seed):
    raise RuntimeError("no model")
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_loops", raising=False)
    (tmp_path / "own_loops.py").write_text(LOOPS)
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    return tmp_path


def check(name: str, file: Path, *more: object) -> int:
    fixed = ("--generate", f"own_loops:{name}", "--samples", 3000, "--json", file)
    return main(["evaluate", "exactness", *map(str, (*fixed, *more))])


@pytest.mark.slow
def test_an_exact_loop_passes_and_a_biased_one_is_found_out(here: Path, capsys: Any) -> None:
    file = here / "r.json"
    against = ("--reference", "own_loops:sample", "--prompts", "prompts.txt")
    assert check("speculative", file, *against) == 0
    report = json.loads(file.read_text())
    (exact,) = report["checks"]
    assert exact["holds"] and exact["figures"]["degrees"] > 50 and report["broken"] == []
    assert report["model"] is None and report["samples"] == 3000
    assert 0 < exact["figures"]["power"] < 1 and "all hold here" in capsys.readouterr().out
    for name in ("cold", "greedy_rejection"):
        assert check(name, file, *against) == 3
        assert json.loads(file.read_text())["broken"] == ["distribution of sequences"]
    assert "BROKEN" in capsys.readouterr().out
    assert check("broken", file, *against) == 2 and "no model" in capsys.readouterr().err


MODEL = """
import torch
from transformers import LlamaForCausalLM

model = LlamaForCausalLM.from_pretrained("lm").eval()

@torch.no_grad()
def ancestral(prompt, seed, temperature=1.0):
    rng = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(2):
        logits = model(torch.tensor([tokens])).logits[0, -1].double() / temperature
        tokens.append(int(torch.multinomial(logits.softmax(-1), 1, generator=rng)))
    return torch.tensor(tokens[len(prompt):])

def warm(prompt, seed):
    return ancestral(prompt, seed, 1.5)

def with_prompt(prompt, seed):
    return [*prompt, 1, 2]
"""


@pytest.mark.slow
def test_the_reference_may_be_the_plain_loop_of_a_model(here: Path, capsys: Any) -> None:
    from mmaccel.demo.recall.words import make_tokenizer

    tokenizer = make_tokenizer()
    model = build_lm("llama", vocab_size=len(tokenizer), initializer_range=0.4)
    model.save_pretrained(here / "lm")
    tokenizer.save_pretrained(here / "lm")
    (here / "own_loops.py").write_text(MODEL)
    (here / "prompts.txt").write_text("f0 f1\n")
    more = ("lm", "--prompts", "prompts.txt", "--max-new-tokens", 2, "--batch-size", 500)
    file = here / "r.json"
    few = ("--samples", 1500)
    assert check("ancestral", file, *more, *few) == 0
    report = json.loads(file.read_text())
    assert report["reference"] == "the plain loop on lm" and report["checks"][0]["holds"]
    assert report["checks"][0]["figures"]["degrees"] > 20
    assert check("warm", file, *more, *few) == 3
    assert check("with_prompt", file, *more, *few) == 2
    assert "expected new tokens alone" in capsys.readouterr().err


def test_cells_are_branches_with_enough_of_both_samples() -> None:
    first = [[1, 2, 3]] * 12 + [[1, 5]] * 9 + [[1, 2]] * 2 + [[7]] * 3
    second = [[1, 2, 3]] * 10 + [[1, 5]] * 11 + [[8]] * 4 + [[7, 9]] * 6
    counts = count_cells(first, second)
    cells = sorted(zip(counts[0].tolist(), counts[1].tolist()))
    # [1, 2] alone joins [1, 2, 3]; 7 and 8 are pooled
    assert cells == [(3, 10), (9, 11), (14, 10)]
    assert [int(side.sum()) for side in counts] == [len(first), len(second)]


@pytest.mark.slow
def test_the_test_keeps_its_level() -> None:
    """Of pairs of samples of one distribution with many rare sequences."""
    from mmaccel.evaluation.exactness.g_test import compare_counts

    rng = np.random.default_rng(0)
    chances = 1 / np.arange(1, 401)  # many tokens are drawn once
    chances /= chances.sum()
    p_values = [
        compare_counts(*count_cells(*rng.choice(400, p=chances, size=(2, 600, 2)).tolist())).p_value
        for _ in range(200)
    ]
    assert 2 <= sum(p < 0.05 for p in p_values) <= 22  # of 10 on average
    assert abs(np.mean(p_values) - 0.5) < 0.08


def test_both_sides_and_all_prompts_have_seeds_of_their_own() -> None:
    """With the same seeds a copy of the reference would be held against its own sequences."""
    seen: list[set[int]] = []

    def draw(number: int, seeds: Sequence[int]) -> list[list[int]]:
        seen.append(set(seeds))
        return [[seed % 3] for seed in seeds]

    (check,) = compare_loops(draw, draw, 2, 1000, 2**64 - 5)
    assert check.holds and [len(seeds) for seeds in seen] == [500] * 4
    assert len(set().union(*seen)) == 2000  # prompts, too: their tests add up as independent


def test_sequences_end_with_their_end_and_must_be_integers() -> None:
    assert cut([3, 4, 5, 6], 3, ()) == [3, 4, 5] and cut([3, 4, 5], 9, {4}) == [3, 4]
    draw = draw_by(lambda prompt, seed: torch.tensor([[seed, 2]]), "--generate", ["a"], 5)
    assert draw(0, [8, 9]) == [[8, 2], [9, 2]]
    assert draw_by(lambda prompt, seed: [], "--generate", ["a"], 5)(0, [1]) == [[]]
    for wrong in ("words", torch.ones(3), torch.ones(2, 3, dtype=torch.int64), [True]):
        with pytest.raises(OptionError, match="^--reference: expected a sequence of integers"):
            draw_by(lambda prompt, seed, made=wrong: made, "--reference", ["a"], 5)(0, [1])


def test_a_loop_has_a_prompt_of_its_own_and_may_draw_it_again() -> None:
    def extend(prompt: list[int], seed: int) -> list[int]:
        prompt += [seed % 2]
        return prompt[1:]

    assert draw_by(extend, "--generate", [[1]], 5)(0, [3, 4, 5]) == [[1], [0], [1]]


def test_a_test_that_cannot_fail_holds_no_guarantee() -> None:
    """Where all sequences are one cell, there is nothing to compare; one that always comes is all
    there is."""

    def draw(number: int, seeds: Sequence[int]) -> list[list[int]]:
        return [[int(seed > 8)] for seed in seeds]  # of nine, too few for a cell

    (check,) = compare_loops(draw, draw, 1, 10, 0)
    assert not check.guaranteed and "cannot fail" in check.said
    (check,) = compare_loops(lambda n, s: [[7]] * len(s), lambda n, s: [[7]] * len(s), 1, 12, 0)
    assert check.guaranteed and check.holds
    with pytest.raises(OptionError, match="--samples: expected at least 10 for each of 500"):
        next(compare_loops(draw, draw, 500, 1000, 0))


def test_options_that_a_loop_of_ones_own_does_not_take(here: Path, capsys: Any) -> None:
    for options in (("--policy", "gsd"), ("--reference", "own_loops:sample", "--top-k", "5")):
        assert check("sample", here / "r.json", *options) == 2
        assert "expected none with --" in capsys.readouterr().err
