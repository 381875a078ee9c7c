"""`mmaccel bench --family canvas`: figures of the joints, of a grammar model, and bad input."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import TextToImage
from mmaccel import loading as opening
from mmaccel.cli import main
from mmaccel.commands.canvas_setups import SETUPS
from mmaccel.demo import canvas_benchmark
from mmaccel.demo.grammar.evaluate import AnswerWords, GrammarText, is_right
from mmaccel.demo.grammar.tasks import (
    ASK,
    BOS,
    END,
    EVALUATION_SEED,
    MASK,
    PAD,
    TASKS,
    WORDS,
    make_examples,
)
from mmaccel.demo.scenes.data import MAX_WORDS
from mmaccel.demo.scenes.data import WORDS as SCENE_WORDS
from tests.fixtures.tiny_model import masked_beside_plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the grammar with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("grammar")
    config = LlamaConfig(
        vocab_size=MASK + 1, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(made)
    words = {"words": list(WORDS), "mask": MASK, "logit_shift": 0}
    (made / "words.json").write_text(json.dumps(words), encoding="utf-8")
    return made


def test_the_joints_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    labels = "stepwise,entropy-bounded 0.5,threshold 0.9"
    options = ["--policies", labels, "--json", str(file)]
    assert main(["bench", "--family", "canvas", "--model", "toys", *options]) == 0
    assert "six joints of 4 slots, exact" in capsys.readouterr().out
    report = json.loads(file.read_text(encoding="utf-8"))
    plain, bound, sure = report["canvas"]
    assert plain["passes"] == pytest.approx(4) and plain["nats"] == 0.0
    assert plain["quality"]["total_variation"] < 1e-9
    assert bound["passes"] < sure["passes"] < 4
    assert 0 < bound["quality"]["total_variation"] < bound["quality"]["worst"]
    assert report["machine"] and report["command"] == shlex.join(["mmaccel", *sys.argv[1:]])


def test_a_grammar_model(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    labels = "stepwise,lossless-unmask,maskgit 12"
    options = ["--model", str(folder), "--policies", labels, "--count", "2", "--json", str(file)]
    assert main(["bench", "--family", "canvas", *options]) == 0
    plain, fast, relaxed = json.loads(file.read_text(encoding="utf-8"))["canvas"]
    n = 2 * len(TASKS)
    assert plain["rows"] == fast["rows"] == n and plain["same"] == fast["same"] == n
    assert fast["passes"] < plain["passes"] and fast["positions"] > plain["positions"]
    assert fast["quality"] == plain["quality"]
    assert relaxed["same"] is not None and relaxed["same"] < n
    assert 0 <= plain["quality"]["right"] <= 1 and set(TASKS) < set(plain["quality"])
    assert 0 < plain["quality"]["floor"] < plain["quality"]["total_variation"] <= 1


def test_images_by_canvas_and_by_window(tmp_path: Path) -> None:
    """Positions are counted where they enter the model: guidance doubles them."""
    file, (source, _) = (
        tmp_path / "found.json",
        masked_beside_plain(tmp_path, 16, [*SCENE_WORDS], MAX_WORDS),
    )
    labels = "stepwise halton,lossless-unmask halton,autoregressive"
    options = ["--model", str(source), "--policies", labels, "--count", "2", "--json", str(file)]
    assert main(["bench", "--family", "canvas", *options]) == 0
    plain, fast, window = json.loads(file.read_text(encoding="utf-8"))["canvas"]
    assert plain["model"] == window["model"] == "masked"
    assert plain["passes"] == window["passes"] == 256 > fast["passes"]
    assert plain["same"] == fast["same"] == 2 and window["same"] is None
    assert fast["quality"] == plain["quality"] and set(window["quality"]) >= {"shapes", "whole"}
    assert 2 * 256 * 256 < plain["positions"] < 2 * 256 * (256 + 34)  # whole canvases
    assert 2 * 256 <= window["positions"] < 2 * (256 + 34)  # guidance doubles them


def test_what_was_measured_before_an_interrupt_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mmaccel.evaluation.exactness import canvas_enumeration as canvas_toys

    law, calls = canvas_toys.enumerate_paths, [0]

    def stopped(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > 6:  # the first policy takes six
            raise KeyboardInterrupt
        return law(*args)

    monkeypatch.setattr(canvas_toys, "enumerate_paths", stopped)
    file = tmp_path / "found.json"
    options = ["--policies", "stepwise,threshold 0.9", "--json", str(file)]
    assert main(["bench", "--family", "canvas", "--model", "toys", *options]) == 130
    said = capsys.readouterr()
    assert "measured 1 policies" in said.err and "stepwise" in said.out
    (row,) = json.loads(file.read_text(encoding="utf-8"))["canvas"]
    assert row["policy"] == "stepwise"


def test_what_has_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, beside = masked_beside_plain(tmp_path)
    options = ["bench", "--family", "canvas", "--policies", "autoregressive", "--model"]
    assert main([*options, "toys"]) == 2
    assert "expected one that can run on toys" in " ".join(capsys.readouterr().err.split())
    assert main([*options, str(beside)]) == 2  # nothing masked about it
    assert "expected a masked model of images" in " ".join(capsys.readouterr().err.split())
    ends = [*options[:4], "entropy-bounded 0.5 end", "--count", "1", "--model"]
    for model in ("toys", str(source)):  # no token ends a joint or an image
        assert main([*ends, model]) == 2
        assert "can run on" in capsys.readouterr().err and not capsys.readouterr().out


def test_models_run_where_they_are_told_to(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def text(source: Path, device: str) -> GrammarText:
        seen.append(device)
        return GrammarText(source, device)

    def pipeline(name: str, device: str) -> TextToImage:
        seen.append(device)
        return TextToImage.from_pretrained(name, device=device)

    monkeypatch.setattr(canvas_benchmark, "GrammarText", text)
    monkeypatch.setattr(opening, "open_pipeline", pipeline)
    words = [*SCENE_WORDS]
    masked, _ = masked_beside_plain(tmp_path / "tiny", 16, words, MAX_WORDS)
    file = tmp_path / "found.json"
    fixed = ["--policies", "maskgit 12", "--count", "1", "--device", "cpu:0", "--json", str(file)]
    for source in (folder, masked):
        assert main(["bench", "--family", "canvas", "--model", str(source), *fixed]) == 0
        assert json.loads(file.read_text(encoding="utf-8"))["machine"]["device"] == "cpu:0"
    assert seen == ["cpu:0", "cpu:0"]


def test_answers_hold_words_alone(folder: Path) -> None:
    text = GrammarText(folder)
    prompt = text.prompt([e.prompt for e in make_examples(EVALUATION_SEED, range(3), "copy")])
    allowed = prompt.layout.allowed(torch.zeros(1, 1, dtype=torch.int64))  # type: ignore[union-attr]
    assert allowed.sum() == MASK - 3 and not allowed[[PAD, BOS, ASK]].any() and allowed[END]
    assert AnswerWords(MASK).forced(torch.zeros(1, 1)) is None
    filled = GrammarText.fill_up(torch.tensor([[5, END, 9], [5, 6, 7]]), torch.tensor([2, 3]))
    assert filled == [[5, END, END], [5, 6, 7]]
    assert not is_right(("copy", "a"), [5] * text.length)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "stepwise,quick"], "--policies: expected labels out of stepwise"),
        (["--policies", ","], "received none"),
        (["--model", "nowhere"], "model: expected a folder"),
        (["--count", "0"], "count: expected at least 1"),
        (["--device", "cdua"], "device: expected a device of this machine, received 'cdua'"),
        (["a red circle"], "a caption: expected none beside --family canvas"),
        (["--guidance", "1"], "--guidance: expected none beside --family canvas"),
        (["--temperature", "0"], "--temperature: expected none beside"),
        (["--windows", "16"], "--windows: expected none beside"),
        (["--dtypes", "bfloat16"], "--dtypes: expected none beside"),
        (["--size", "64"], "--size: expected none beside"),
        (["--decoder", "."], "--decoder: expected none beside"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = [] if "--model" in arguments else ["--model", "toys"]
    assert main(["bench", "--family", "canvas", *model, *arguments]) in (1, 2)
    said = " ".join(capsys.readouterr().err.split())
    assert message in said and "passes" not in said  # nothing was measured


def test_every_setup_is_a_policy() -> None:
    from mmaccel.catalog import find_policy, make_policy

    for name, options in SETUPS.values():
        assert find_policy(name).kind == getattr(make_policy(name, **options), "kind", "window")
