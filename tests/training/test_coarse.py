"""The maker of coarse models, on tiny models: what it records, what it writes, that it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.coarse_model import CoarseConfig
from scripts.training import coarse
from scripts.training.coarse_fit import CoarseFit
from scripts.training.coarse_passes import PassData, RecordedJacobi, collect_passes
from scripts.training.coarse_targets import LARGEST_FILE, open_target
from tests.fixtures.checkpoints import build_checkpoint
from tests.fixtures.media import build_media
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import build_tiny_clips

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], [9, 8], [11, 12, 13, 14]]
SMALL = ["--samples", "6", "--batch", "3", "--window", "8", "--measured", "3"]
SMALL += ["--width", "16", "--embedding", "8", "--steps", "25"]


def make_text_model(folder: Path, **changes: Any) -> list[str]:
    """A causal LM and a file of prompts; the arguments that name them."""
    build_lm("llama", **changes).save_pretrained(folder / "model")
    lines = [" ".join(map(str, ids)) for ids in PROMPTS]
    (folder / "prompts.txt").write_text("\n".join(lines))
    options = ["--kind", "text", "--ids", "--length", "40"]
    named = [str(folder / "model"), str(folder / "out"), "--prompts", str(folder / "prompts.txt")]
    return [*named, *options, *SMALL]


def read_card(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "coarse.json").read_text())
    return found


def test_a_made_coarse_model_changes_no_tokens_and_its_training_goes_on(tmp_path: Path) -> None:
    arguments = make_text_model(tmp_path)
    coarse.main(arguments)
    card = read_card(tmp_path)
    (row,) = card["tokens_per_pass"]
    assert row["is_equal"] and row["coarse"] != row["neighbour"]
    assert card["cross_entropy"]["model_seen"] < card["cross_entropy"]["seen"]
    assert (tmp_path / "out" / "coarse.safetensors").stat().st_size < LARGEST_FILE
    drafts = mmaccel.Jacobi(8, mmaccel.Coarse(str(tmp_path / "out")))
    model = build_lm("llama")
    found = []
    for policy in (mmaccel.Autoregressive(), drafts):
        with mmaccel.attach(model, policy, seed=4):
            ids = torch.tensor([[5, 6, 7]])
            found.append(model.generate(ids, max_new_tokens=40, do_sample=True, top_k=0))
    assert torch.equal(*found)
    passes = sorted((tmp_path / "out" / "work").glob("passes-*"))
    times = [file.stat().st_mtime_ns for file in passes]
    coarse.main([*arguments, "--steps", "50"])
    assert len(passes) == 2 and [file.stat().st_mtime_ns for file in passes] == times
    assert (card["steps"], read_card(tmp_path)["steps"]) == (25, 50)
    with pytest.raises(OptionError, match="work: expected .*, received others; give another"):
        coarse.main([*arguments, "--window", "9"])


def test_what_is_recorded_is_what_the_models_own_pass_says(tmp_path: Path) -> None:
    """States of right tokens, stale ones, and the neighbours before a slot, also in the prompt."""
    target = open_target(coarse.parse(make_text_model(tmp_path)))
    config = target.config(16, 8)
    policy = RecordedJacobi(8, "neighbour", config=config)
    made = target.sample(policy, range(3))
    (run,) = policy.runs
    model = target.window.model
    for row, prompt in enumerate(PROMPTS):
        n = int(made.lengths[row])
        ids = torch.tensor([prompt + made.tokens[row, :n].tolist()])
        states = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
        assert torch.allclose(run["finals"][row, :n].float(), states, atol=0.02)
    is_stale = (run["finals"][run["rows"], run["slots"]] != run["states"]).any(1)
    assert is_stale.float().mean() > 0.5
    files = collect_passes(
        target, policy, tmp_path / "work", range(3), 2, [None]
    )  # 3 and 4 ids wide
    data, at = PassData(files, config), torch.tensor([2, 0, 1])
    slots = data._make(torch.arange(3), at, torch.zeros(3).long(), None, torch.zeros(3, 32))
    for row, slot in enumerate(at.tolist()):
        before = (PROMPTS[row] + made.tokens[row, :slot].tolist())[::-1][:8]
        assert slots.now[row].tolist() == before + [40] * (8 - len(before))
        assert int(slots.tokens[row]) == int(made.tokens[row, slot])


def test_half_of_the_new_slots_are_of_rows_of_one_token_a_pass(tmp_path: Path) -> None:
    """Behind a slot's final state, never behind the end of a row, nor in validation."""
    target = open_target(coarse.parse(make_text_model(tmp_path)))
    config = target.config(16, 8)
    few, plain = (RecordedJacobi(width, "neighbour", config=config) for width in (8, 1))
    files = collect_passes(target, few, tmp_path / "few", range(3), 3, [None])
    more = collect_passes(target, plain, tmp_path / "plain", range(3, 6), 3, [None])
    data = PassData([*files, *more], config)
    finals, lengths = plain.runs[0]["finals"].float(), plain.runs[0]["lengths"]
    found = data.draw_unseen(1000, torch.Generator().manual_seed(0))
    before = found.slots - found.distances
    is_plain = (finals[:, before].transpose(0, 1) == found.states[:, None]).all(-1)  # [K, 3]
    assert bool(is_plain[500:].any(1).all()) and not bool(is_plain[:500].any())
    rows = is_plain[500:].int().argmax(1)
    assert bool((found.slots[500:] < lengths[rows]).all()) and int(found.distances.min()) == 1
    assert torch.equal(found.finals[500:], finals[rows, found.slots[500:]])
    rng = torch.Generator().manual_seed(0)
    checked = data.draw_unseen(200, rng, is_validation=True).states
    assert not bool((checked[:, None] == finals.flatten(0, 1)).all(-1).any())


def test_a_large_vocabulary_is_normalised_over_a_part(tmp_path: Path) -> None:
    arguments = make_text_model(tmp_path, vocab_size=6000)
    coarse.main(arguments)
    target = open_target(coarse.parse(arguments))
    config = CoarseConfig(**{**read_card(tmp_path)["config"], "neighbours": target.neighbours})
    data = PassData(sorted((tmp_path / "out" / "work").glob("passes-*")), config)
    output = target.window.output_matrix().detach()
    tokens = torch.tensor([17, 4000])
    head = CoarseFit(config, output, data).head(tokens, torch.Generator().manual_seed(0))
    assert 1024 <= len(head) < 1100
    assert all(bool((head == output[token]).all(1).any()) for token in tokens)


@pytest.mark.parametrize("kind", ["image", "speech", "video"])
def test_pipelines_models_get_coarse_models_of_their_grid(kind: str, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("a red circle\na blue square on grass")
    options = ["--kind", kind, "--guidance", "2", "--prompts", str(tmp_path / "prompts")]
    if kind == "image":
        source = build_checkpoint("llamagen-c2i", tmp_path)
        (tmp_path / "prompts").write_text("1\n4\n0")
        options += ["--size", "64"]
        grid, neighbour = [4, 16, 16], [0, 1, 0]
    elif kind == "video":
        source = build_tiny_clips(tmp_path / "clips")
        grid, neighbour = [4, 16, 48], [1, 0, 0]
    else:
        source, codec = build_media("orpheus", tmp_path)
        options = ["--kind", kind, "--codec", str(codec), "--max-seconds", "0.008"]
        grid, neighbour = None, [0, 0, -14]
    coarse.main([str(source), str(tmp_path / "out"), *options, *SMALL])
    card = read_card(tmp_path)
    assert all(row["is_equal"] for row in card["tokens_per_pass"])
    sizes = [card["config"][name] for name in ("columns", "frame", "n_slots")]
    assert grid in (None, sizes) and neighbour in card["config"]["neighbours"]
