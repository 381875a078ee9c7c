"""The maker of coarse models, on tiny models: what it records, what it writes, that it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import mmaccel
from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.coarse_model import CoarseConfig
from scripts.training import coarse
from scripts.training.coarse_fit import CoarseTraining
from scripts.training.coarse_passes import PassData, RecordedJacobi, collect_passes
from scripts.training.coarse_targets import LARGEST_FILE, Target, count_bytes, open_target
from tests.fixtures.checkpoints import build_checkpoint
from tests.fixtures.media import build_media
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import build_tiny_clips

PROMPTS = [[5, 6, 7], [9, 8], [11, 12, 13, 14]]
TEXT = ["--kind", "text", "--ids", "--length", "40"]
SMALL = ["--samples", "6", "--batch", "3", "--window", "8", "--measured", "3"]
SMALL += ["--width", "16", "--embedding", "8", "--minutes", "0.03"]


def make_text_model(folder: Path, **changes) -> list[str]:
    """A causal LM and a file of prompts; the arguments that name them."""
    build_lm("llama", **changes).save_pretrained(folder / "model")
    lines = [" ".join(map(str, ids)) for ids in PROMPTS]
    (folder / "prompts.txt").write_text("\n".join(lines))
    return [str(folder / "model"), str(folder / "out"), "--prompts", str(folder / "prompts.txt")]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Arguments of a command, and its folder once it ran."""
    folder = tmp_path_factory.mktemp("text")
    arguments = [*make_text_model(folder), *TEXT, *SMALL]
    coarse.main(arguments)
    return arguments, folder / "out"


def read_card(folder: Path) -> dict:
    return json.loads((folder / "coarse.json").read_text())


def test_a_made_coarse_model_changes_drafts_and_no_tokens(made):
    from transformers import AutoModelForCausalLM

    arguments, out = made
    card = read_card(out)
    (row,) = card["tokens_per_pass"]
    assert row["is_equal"] and row["coarse"] != row["neighbour"]
    assert card["cross_entropy"]["model_seen"] < card["cross_entropy"]["seen"]
    assert (out / "coarse.safetensors").stat().st_size < LARGEST_FILE
    model = AutoModelForCausalLM.from_pretrained(arguments[0]).eval()
    ids, found = torch.tensor([[5, 6, 7]]), []
    for drafts in ("neighbour", mmaccel.Coarse(str(out))):
        with mmaccel.attach(model, mmaccel.Jacobi(8, drafts), seed=4):
            found.append(model.generate(ids, max_new_tokens=40, do_sample=True, top_k=0))
    assert torch.equal(*found)


def test_the_command_goes_on_where_it_stopped(made):
    arguments, out = made
    files = {file: file.stat().st_mtime_ns for file in (out / "work").glob("passes-*")}
    n_before = read_card(out)["steps"]
    coarse.main([*arguments, "--minutes", "0.06", "--curve", "2"])
    card = read_card(out)
    assert len(files) == 2 and all(file.stat().st_mtime_ns == t for file, t in files.items())
    assert card["steps"] > n_before
    assert [point["minutes"] for point in card["curve"]] == [0.06]  # the first one had passed
    with pytest.raises(OptionError, match="work: expected .*, received others; give another"):
        coarse.main([*arguments, "--window", "9"])


def test_recorded_states_are_those_of_the_models_own_pass(tmp_path):
    args = coarse._parse([*make_text_model(tmp_path), *TEXT])
    target = open_target(args)
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


def test_neighbours_are_the_tokens_before_a_slot_also_in_the_prompt(tmp_path):
    args = coarse._parse([*make_text_model(tmp_path), *TEXT])
    target = open_target(args)
    assert [k % 3 for k in target.fresh_rows(1, 2)] == [1, 2]  # prompts that row 0 has not
    config = target.config(16, 8)
    policy = RecordedJacobi(8, "neighbour", config=config)
    files = collect_passes(target, policy, tmp_path / "work", 3, 2, [None])  # 3 and 4 ids wide
    data, made = PassData(files, config), target.sample(policy, range(3))
    slots = data._make(
        torch.arange(3), torch.tensor([2, 0, 1]), torch.zeros(3).long(), None, torch.zeros(3, 32)
    )
    for row, slot in enumerate((2, 0, 1)):
        before = (PROMPTS[row] + made.tokens[row, :slot].tolist())[::-1][:8]
        assert slots.now[row].tolist() == before + [40] * (8 - len(before))
        assert int(slots.tokens[row]) == int(made.tokens[row, slot])


def test_a_large_vocabulary_is_normalised_over_a_part_of_its_ids(tmp_path):
    arguments = [*make_text_model(tmp_path, vocab_size=6000), *TEXT, *SMALL]
    coarse.main(arguments)
    card = read_card(tmp_path / "out")
    assert card["config"]["vocab_size"] == 6000 and card["tokens_per_pass"][0]["is_equal"]

    target = open_target(coarse._parse(arguments))
    config = CoarseConfig(**{**card["config"], "neighbours": target.neighbours})
    files = sorted((tmp_path / "out" / "work").glob("passes-*"))
    data = PassData(files, config)
    output = target.window.output_matrix().detach()
    training = CoarseTraining(config, output, data, tmp_path, 1.0)
    tokens = torch.tensor([17, 4000])
    head = training._head(tokens, torch.Generator().manual_seed(0))
    assert 1024 <= len(head) < 1100
    assert all(bool((head == output[token]).all(1).any()) for token in tokens)


def test_recorded_states_are_the_guided_ones(tmp_path):
    (tmp_path / "labels").write_text("1\n4\n0")
    source = build_checkpoint("llamagen-c2i", tmp_path)
    options = ["--size", "64", "--prompts", str(tmp_path / "labels"), "--temperature", "0"]
    target = open_target(coarse._parse([str(source), str(tmp_path / "out"), *options]))
    policy = RecordedJacobi(8, "neighbour", config=target.config(16, 8))
    made = target.sample(policy, range(3), 3.0)
    scores = policy.runs[0]["finals"].float() @ target.window.output_matrix().T
    assert torch.equal(scores.argmax(-1), made.tokens)


def test_weights_that_are_worse_on_other_rows_are_not_kept(made, tmp_path):
    arguments, out = made
    args = coarse._parse(arguments)
    config = open_target(args).config(16, 8)
    data = PassData(sorted((out / "work").glob("passes-*")), config)
    output = open_target(args).window.output_matrix().detach()
    training = CoarseTraining(config, output, data, tmp_path, 1.0)
    training.run(0.01)
    lowest = training.lowest
    with torch.no_grad():
        training.model.out.weight.mul_(50)
    training._check()
    found = training.at_best().validate()
    assert found["seen"] + found["unseen"] == training.lowest == lowest


@pytest.mark.parametrize("kind", ["image", "speech", "video"])
def test_pipelines_models_get_coarse_models_of_their_grid(kind, tmp_path):
    if kind == "image":
        source, options = build_checkpoint("llamagen-c2i", tmp_path), ["--size", "64"]
        (tmp_path / "labels").write_text("1\n4\n0")
        options += ["--guidance", "1", "3", "--prompts", str(tmp_path / "labels")]
    elif kind == "video":
        source = build_tiny_clips(tmp_path / "clips")
        (tmp_path / "captions").write_text("a red circle\na blue square on grass")
        options = ["--kind", "video", "--guidance", "2", "--prompts", str(tmp_path / "captions")]
    else:
        source, codec = build_media("orpheus", tmp_path)
        options = ["--kind", "speech", "--codec", str(codec), "--max-seconds", "0.008"]
    coarse.main([str(source), str(tmp_path / "out"), *options, *SMALL])
    card = read_card(tmp_path / "out")
    assert all(row["is_equal"] for row in card["tokens_per_pass"])
    config = card["config"]
    if kind == "image":
        assert (config["columns"], config["frame"], config["n_slots"]) == (4, 16, 16)
        assert [row["guidance"] for row in card["tokens_per_pass"]] == [1, 3]
    elif kind == "video":
        assert (config["columns"], config["frame"], config["n_slots"]) == (4, 16, 48)
        assert [1, 0, 0] in config["neighbours"] and [0, 1, 0] in config["neighbours"]
        assert [row["guidance"] for row in card["tokens_per_pass"]] == [2]
    else:
        assert [0, 0, -7] in config["neighbours"] and [0, 0, -14] in config["neighbours"]


def test_coarse_models_stay_small_whatever_the_model():
    class Window:
        def __init__(self, *shape):
            self.shape = shape

        def output_matrix(self):
            return torch.empty(self.shape, device="meta")

    neighbours = tuple((0, 0, -k) for k in range(1, 9))
    widths = []
    for shape in ((1000, 256), (16384, 2048), (152_000, 4096)):
        target = Target("m", Window(*shape), [], None, neighbours, n_slots=1024)
        config = target.config()
        assert count_bytes(config) <= LARGEST_FILE
        widths.append(config.width)
    assert widths == sorted(widths, reverse=True) and widths[-1] >= 32
    with pytest.raises(OptionError, match="width: expected .*, received .*; choose a smaller"):
        target.config(width=512)
