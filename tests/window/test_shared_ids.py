"""Draft models with a part of the target's vocabulary: drafts change, the distribution does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import mmaccel
from mmaccel import CausalLMWindow, DraftModel, Eagle, Jacobi, Speculative
from mmaccel.contracts import Pass
from mmaccel.samplers.drafting import shared_ids
from mmaccel.samplers.window import fresh_drafts
from scripts.training.stdlib import make_prompts, open_stdlib
from tests.fixtures.heads import make_head
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_distribution import SETTINGS, assert_exact, assert_rejected
from tests.fixtures.toy_models import sample

KEPT = (33, 2, 7, 8, 21, 30, 12)
PROMPTS = [[5, 6, 9, 33], [2], [7, 8, 39]]


def logits_of(window: Any, rows: list[list[int]]) -> Tensor:
    window.reserve(len(rows), len(rows[0]))
    return window.forward(Pass(torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64)))


def assert_spread(found: Tensor, ids: Tensor, wanted: Tensor) -> None:
    """`wanted` at these ids, and no probability elsewhere."""
    torch.testing.assert_close(found[..., ids], wanted)
    rest = found.softmax(-1).index_fill(-1, ids, 0.0)
    assert not rest.any()


@pytest.mark.parametrize("name", ["llama", "gpt2", "cohere", "gemma"])
def test_a_trimmed_model_says_some_of_its_ids_alone(name: str) -> None:
    model = build_lm(name)
    ids = torch.tensor(KEPT)
    rows = [[5, 6, 9, 33], [1, 39, 20, 2]]
    whole = logits_of(CausalLMWindow(model), rows)
    assert_spread(logits_of(mmaccel.trim_vocabulary(model, ids), rows), ids, whole[..., ids])


def test_another_vocabulary_is_read_and_said_by_its_map() -> None:
    model = build_lm("llama", vocab_size=5)
    ids = torch.tensor([4, 9, 2, 11, 7])
    window = mmaccel.share_ids(model, 12, ids, unknown=3)
    own = logits_of(CausalLMWindow(model), [[1, 0, 3, 3]])
    assert window.vocab_size == 12
    assert_spread(logits_of(window, [[9, 4, 11, 5]]), ids, own)  # 5 is not known


@pytest.mark.parametrize("vocab_size", [43, 37])
def test_a_table_that_was_padded_differently_shares_its_first_ids(vocab_size: int) -> None:
    model = build_lm("llama")
    n = min(40, vocab_size)
    own = logits_of(CausalLMWindow(model), [[5, 6, 36]])
    found = logits_of(mmaccel.share_ids(model, vocab_size), [[5, 6, 36]])
    assert found.shape[-1] == vocab_size
    assert_spread(found, torch.arange(n), own[..., :n])


def decode(policy: Any, temperature: float = 1.0) -> Any:
    window = CausalLMWindow(build_lm("llama"))
    return sample(policy, window, PROMPTS, 20, seed=[4, 5, 6], temperature=temperature)


def small(kind: str) -> Any:
    if kind == "trimmed":
        return mmaccel.trim_vocabulary(build_lm("llama"), KEPT)
    return mmaccel.share_ids(build_lm("qwen2", vocab_size=len(KEPT)), 40, KEPT)


@pytest.mark.parametrize("kind", ["trimmed", "mapped"])
def test_tokens_are_the_plain_loops(kind: str) -> None:
    for temperature in (0.0, 1.0):
        plain = decode(mmaccel.Autoregressive(), temperature)
        source = DraftModel(small(kind))
        assert torch.equal(decode(Jacobi(4, source), temperature).tokens, plain.tokens)
    plain = decode(mmaccel.Autoregressive(), 0.0)
    found = decode(Speculative(4, small(kind)), 0.0)
    assert torch.equal(found.tokens, plain.tokens)
    if kind == "trimmed":  # the target itself, where it says one of these ids
        assert found.stats.passes < plain.stats.passes


@pytest.mark.parametrize("third", [False, True])
def test_a_head_is_trimmed_too(third: bool, tmp_path: Path) -> None:
    folder = make_head(build_lm("llama"), tmp_path, third=third)
    plain = decode(mmaccel.Autoregressive())
    made = []
    for ids in (None, tuple(range(40)), KEPT):
        made.append(decode(Jacobi(4, Eagle(str(folder), ids=ids))))
        assert torch.equal(made[-1].tokens, plain.tokens)
    assert made[0].stats.accepted == made[1].stats.accepted


# --- the distribution


def drafter(vocab_size: int) -> Any:
    """A model without the target's id 0; its ids stand for the others, in descending order."""
    ids = list(range(vocab_size - 1, 0, -1))
    return mmaccel.share_ids(build_lm("llama", vocab_size=len(ids)), vocab_size, ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "guided", "structural tokens", "hot, top-n-sigma, eta"])
def test_the_distribution_is_the_targets(name: str) -> None:
    setting = SETTINGS[name]
    assert_exact(Speculative(3, drafter(setting.vocab_size)), setting)


@pytest.mark.slow
def test_a_residual_without_what_the_drafter_lacks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fresh_drafts.residual

    def residual(p_target: Tensor, p_draft: Tensor) -> Tensor:
        found = own(p_target, p_draft).where(p_draft > 0, 0.0)
        return found.where(found.sum(-1, keepdim=True) > 0, p_target)

    monkeypatch.setattr(fresh_drafts, "residual", residual)
    assert_rejected(Speculative(3, drafter(3)), SETTINGS["plain"])


# --- which ids


def test_frequent_ids_are_counted() -> None:
    texts = [[5, 5, 9, 1], [9, 5, 7, 1], [2]]
    assert mmaccel.frequent_ids(texts, 2) == (1, 5)  # of equals, the first
    assert mmaccel.frequent_ids(texts, 3) == (1, 5, 9)
    assert mmaccel.frequent_ids(texts, 3, always=(2,)) == (1, 2, 5)
    assert mmaccel.frequent_ids(texts, 2, always=(30,)) == (5, 30)


WRITERS: dict[str, Callable[[Path], None]] = {
    "ids.json": lambda file: file.write_text(json.dumps([4, 9, 30])) and None,
    "ids.safetensors": lambda file: save_file({"d2t": torch.tensor([4, 8, 28])}, file),
}


@pytest.mark.parametrize("name", WRITERS)
def test_ids_come_from_a_file(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert shared_ids.read_ids(tmp_path / name, 40).tolist() == [4, 9, 30]


@pytest.mark.slow
def test_a_quarter_of_the_ids_drafts_most_of_what_all_do() -> None:
    model, tokenizer = open_stdlib()
    texts = make_prompts(tokenizer, 24, 512)
    prompts = [text[:128] for text in texts[:3]]
    ids = mmaccel.frequent_ids(texts[4:], 512)
    passes = {}
    made = {}
    for name, given in {"all": None, "a quarter": ids}.items():
        policy = Jacobi(6, Eagle(f"{model.name_or_path}/head", ids=given))
        with mmaccel.attach(model, policy, strict=True) as run:
            made[name] = [
                model.generate(torch.tensor([each]), max_new_tokens=48, do_sample=False)
                for each in prompts
            ]
            passes[name] = run.stats.passes
    assert all(map(torch.equal, *made.values()))
    assert passes["all"] <= passes["a quarter"] < 1.6 * passes["all"]
