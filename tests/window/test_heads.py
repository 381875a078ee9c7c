"""Heads that draft: tokens and distribution are the plain loop's, drafts those of the head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mmaccel
from mmaccel import CausalLMWindow, Eagle, Jacobi, Speculative
from mmaccel.samplers.drafting import in_turn
from tests.fixtures.enumerated import draw_enumerated
from tests.fixtures.heads import (
    CALLS,
    CONFIG,
    KINDS,
    LAYERS,
    WEIGHTS,
    Bug,
    Kind,
    decode,
    make_head,
    rows_of,
    watch,
)
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import sample

ONE_EACH = ("eagle", "eagle3", "mtp, sliding", "dflash, sliding", "pard", "canvas")


def later(*values: Any) -> Any:
    """Values of a parametrized test that the fast lane leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def find(name: str) -> Kind:
    pytest.importorskip(KINDS[name].requires)
    return KINDS[name]


@pytest.mark.parametrize(
    ("name", "call"),
    [(name, call) for n, name in enumerate(ONE_EACH) for call in [*CALLS][n % 2 :: 2]],
)
def test_jacobi_has_the_plain_loops_tokens(name: str, call: str, tmp_path: Path) -> None:
    model, source = find(name).make(tmp_path, 40)
    given = CALLS[call]
    if call == "fused" and name.startswith("mtp"):  # a layer that the fused decoder does not know
        given = {"vocab_size": 38}
    plain = decode(mmaccel.Autoregressive(), model, **given)
    found = decode(Jacobi(window=5, drafts=source), model, **given)
    assert torch.equal(found.tokens, plain.tokens)
    assert found.stats.draft_passes > 0


def draft_greedily(
    name: str, folder: Path, patch: pytest.MonkeyPatch, bug: Bug | None = None, **given: Any
) -> tuple[float, Any, Any]:
    """The share of windows whose drafts are those by hand, what was made, and the model."""
    kind = find(name)
    model, source = kind.make(folder, 40)
    drafted = watch(kind.drafter, patch)
    with patch.context() as planted:
        if bug is not None:
            owner, function, make = bug
            planted.setattr(owner, function, make(getattr(owner, function)))
        policy = Jacobi(window=4, drafts=source)
        made = decode(policy, model, temperature=0.0, n_rows=3, **given)
    right = [kind.by_hand(model, folder, before, len(own)) == own for before, own in drafted]
    assert len(right) > 15
    return sum(right) / len(right), made, model


@pytest.mark.parametrize(
    ("name", "call"),
    [*((name, "") for name in KINDS), ("eagle3", "chunks"), ("eagle3", "fused"),
     *(later(name, "chunks") for name in ONE_EACH if name != "eagle3"),
     later("dflash, full", "fused")],
)  # fmt: skip
def test_drafts_are_those_of_the_head_over_the_whole_row(
    name: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert draft_greedily(name, tmp_path, monkeypatch, **CALLS[call])[0] == 1


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *((name, 0) for name in ONE_EACH),
        *(later(name, n) for name in ONE_EACH for n in range(1, len(KINDS[name].bugs))),
    ],
)
def test_planted_bugs_change_drafts_and_no_token(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = KINDS[name].bugs[number]
    share, found, model = draft_greedily(name, tmp_path, monkeypatch, bug)
    assert share < 1
    plain = decode(mmaccel.Autoregressive(), model, temperature=0.0, n_rows=3)
    assert torch.equal(found.tokens, plain.tokens)


@pytest.mark.parametrize(
    ("name", "is_wrong"),
    [("eagle3", False), later("eagle3", True),
     *(later(name, is_wrong) for name in ("mtp", "dflash, full", "pard", "canvas")
       for is_wrong in (False, True))],
)  # fmt: skip
def test_speculative_has_the_models_distribution(
    name: str, is_wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a wrong distribution of drafts is seen."""
    model, source = find(name).make(tmp_path, 5)
    if is_wrong:
        monkeypatch.setattr(in_turn, "draw", lambda chances, coins: chances.argmax(-1))
    p_value, stats = draw_enumerated(model, Speculative(window=3, drafts=source))
    assert (p_value > 1e-4) != is_wrong
    assert stats.passes < 3 * stats.draft_passes


@pytest.mark.parametrize("name", ["eagle3", "mtp", "dflash, full"])
def test_attach_takes_a_head_and_leaves_the_model_as_it_is(name: str, tmp_path: Path) -> None:
    model, source = find(name).make(tmp_path, 40)
    before = {key: each.requires_grad for key, each in model.named_parameters()}
    ids = torch.tensor(rows_of(1))
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(ids, **options)
    with mmaccel.attach(model, Jacobi(window=3, drafts=source), strict=True) as run:
        assert torch.equal(model.generate(ids, **options), plain)
        assert run.stats is not None and not run.stats.fallbacks
    assert {key: each.requires_grad for key, each in model.named_parameters()} == before
    if name == "mtp":
        assert torch.equal(model.generate(ids, **options, use_mtp=True), plain)


# --- of one kind


def test_an_eagle_head_with_fewer_tokens_scores_those_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_lm("llama")
    folder = make_head(model, tmp_path, third=True, n_ids=11)
    offsets = load_file(folder / WEIGHTS)["d2t"]
    known = set((torch.arange(11) + offsets).tolist())
    plain = decode(mmaccel.Autoregressive(), model)
    drafted = watch(KINDS["eagle3"].drafter, monkeypatch)
    found = decode(Jacobi(window=4, drafts=Eagle(str(folder))), model)
    assert torch.equal(found.tokens, plain.tokens)
    assert {token for _, drafts in drafted for token in drafts} <= known
    assert len(known) == 11


@pytest.mark.parametrize("third", [False, True])
def test_the_layout_of_eagle_is_that_of_the_authors(third: bool, tmp_path: Path) -> None:
    head = make_head(build_lm("llama"), tmp_path, third=third)
    names = set(load_file(head / WEIGHTS))
    prefix = "midlayer" if third else "layers.0"
    assert {f"{prefix}.self_attn.q_proj.weight", f"{prefix}.mlp.up_proj.weight"} < names
    assert ("fc.bias" in names) != third and ("lm_head.weight" in names) == third
    config = json.loads((head / CONFIG).read_text(encoding="utf-8"))
    assert config["eagle_aux_hidden_state_layer_ids"] == (list(LAYERS) if third else [])


def test_a_run_that_has_ended_keeps_no_states(tmp_path: Path) -> None:
    model, source = KINDS["eagle"].make(tmp_path, 40)
    window = CausalLMWindow(model)
    sample(Jacobi(window=4, drafts=source), window, [[5, 6]], 6)
    assert not window.keeps_states and window.read_prompt is None
