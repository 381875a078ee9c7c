"""`mmaccel bench`: window policies on an image model, canvas policies on toys and masked models."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import TextToImage, loading
from mmaccel.cli import main
from mmaccel.commands.bench import window as bench_window
from mmaccel.commands.bench.canvas import SETUPS
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
from mmaccel.evaluation.speed.rows import half_width
from mmaccel.options import LoadOptions
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.results import Stats
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS, masked_beside_plain

KEYS = {  # of a row in the file, which other programs read
    *("policy", "window", "dtype", "drafts", "guidance", "settings", "route", "exactness"),
    *("images", "passes", "tokens_per_pass", "half_width", "seconds", "speed_up", "identical"),
    *("sampler_share", "total_variation", "promise"),
}


def bench(tiny_folder: Path, *arguments: str) -> int:
    fixed = ["--model", str(tiny_folder), "--count", "1", "--windows", "4"]
    return main(["bench", CAPTIONS[0], *fixed, "--guidance", "1.0", *arguments])


@pytest.mark.parametrize(
    "flags, route, given",
    [
        ([], "fused", ("auto", False)),
        (["--no-fused"], "model", (False, False)),
        (["--fused", "--no-compile"], "fused", (True, False)),
        (["--compile"], "fused", ("auto", True)),
    ],
    ids=["default", "model", "fused", "compiled"],
)
def test_bench_runs_every_pass_by_one_forward(
    flags: list[str], route: str, given: tuple[object, object],
    tiny_folder: Path, tmp_path: Path, monkeypatch,
) -> None:  # fmt: skip
    """Nothing is compiled in the middle of a measurement: "auto" would do that."""
    asked = []

    def load(name: str, asked_for: LoadOptions, **options: Any) -> TextToImage:
        asked.append((asked_for.fused, asked_for.compile))
        without = replace(asked_for, compile=False)  # compiling takes long
        return loading.open_pipeline(name, without, **options)

    monkeypatch.setattr(bench_window, "open_pipeline", load)
    file = tmp_path / "bench.json"
    assert bench(tiny_folder, *flags, "--policies", "jacobi", "--json", str(file)) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["route"] for row in rows] == [route, route] and asked == [given]


def test_bench_measures_everything_in_one_table(tiny_folder: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "bench.json"
    options = ["--windows", "1,4", "--guidance", "1.0,2.0", "--count", "1", "--json", str(file)]
    assert main(["bench", CAPTIONS[0], "--model", str(tiny_folder), *options]) == 0
    report = json.loads(file.read_text())
    rows = report["rows"]
    names = ["jacobi", "sjd", "mc-sjd", "gumbel-sjd", "prompt-lookup", "gsd", "pcg", "row-parallel"]
    wanted = [("autoregressive", None), *((name, w) for name in names for w in (1, 4))]
    assert [(r["policy"], r["window"]) for r in rows] == wanted * 2
    assert [r["guidance"] for r in rows] == [1.0] * 17 + [2.0] * 17
    assert {key for row in rows for key in row} == KEYS
    for row in rows:
        if row["policy"] in ("autoregressive", "jacobi"):
            assert row["identical"] == row["images"] == 1
        if row["window"] in (None, 1):
            assert row["passes"] == N_TOKENS and row["tokens_per_pass"] == 1.0
        assert row["passes"] * row["tokens_per_pass"] == pytest.approx(N_TOKENS)
        assert 0 < row["sampler_share"] < 1 and row["seconds"] > 0
        assert row["route"] == "fused"
        assert (row["total_variation"] > 0) <= (row["exactness"] == "relaxed")
    assert rows[0]["speed_up"] == 1.0
    assert report["machine"]["versions"]["torch"] == torch.__version__
    assert "gumbel-sjd" in capsys.readouterr().out


def test_ctrl_c_keeps_what_bench_has_measured(
    tiny_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    file, calls = tmp_path / "bench.json", []
    stream = TextToImage.stream

    def stop_in_the_third(pipe: TextToImage, *args: Any, **options: Any) -> Any:
        calls.append(options["seed"])
        if len(calls) == 6:  # the second of the third round
            raise KeyboardInterrupt
        return stream(pipe, *args, **options)

    monkeypatch.setattr(TextToImage, "stream", stop_in_the_third)
    options = ["--windows", "4", "--guidance", "1.0", "--count", "5", "--json", str(file)]
    options += ["--policies", "jacobi", "--model", str(tiny_folder)]
    assert main(["bench", *options, CAPTIONS[0]]) == 130
    report, captured = json.loads(file.read_text()), capsys.readouterr()
    assert len(report["captions"]) == 2 and [r["images"] for r in report["rows"]] == [2, 2]
    assert calls == [[0], [0], [1], [1], [2], [2]]
    assert "stopped; measured 2 of 5 prompts" in captured.err and "2 prompts" in captured.out


def test_interval_of_the_tokens_a_pass() -> None:
    passes = torch.tensor([50, 70] * 8)
    tokens = torch.zeros(16, 240, dtype=torch.long)
    stats = Stats(tokens=16 * 240, row_passes=int(passes.sum()))
    made = ImageOutput([], tokens, passes, stats, ["a"] * 16)
    spread = 10 * (16 / 15) ** 0.5  # standard deviation of the passes
    assert half_width(made) == pytest.approx(4 * 1.96 * spread / 60 / 4)
    few = ImageOutput([], tokens[:9], passes[:9], stats, ["a"] * 9)
    assert half_width(few) is None


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype of the model in every run of a policy."""
    dtypes: list[torch.dtype] = []
    build = TextToImage.sample

    def spy(pipe: TextToImage, *args: Any, **options: Any) -> Any:
        dtypes.append(pipe.model.model.dtype)  # type: ignore[attr-defined]
        return build(pipe, *args, **options)

    monkeypatch.setattr(TextToImage, "sample", spy)
    return dtypes


def test_bench_compares_dtypes_with_the_first_and_measures_everything_once(
    tiny_folder: Path, tmp_path: Path, used: list[torch.dtype]
) -> None:
    file = tmp_path / "bench.json"
    options = ["--windows", "4,04,4", "--guidance", "1,1.0", "--json", str(file)]
    options += ["--policies", "jacobi,jacobi,sjd", "--dtypes", "float32,bfloat16"]
    assert bench(tiny_folder, *options) == 0
    rows = json.loads(file.read_text())["rows"]
    exact = [("autoregressive", "bitwise"), ("jacobi", "bitwise"), ("sjd", "distribution")]
    rounded = [(name, "up to rounding") for name, _ in exact[:2]] + exact[2:]
    wanted = [("float32", *each) for each in exact] + [("bfloat16", *each) for each in rounded]
    assert [(r["dtype"], r["policy"], r["promise"]) for r in rows] == wanted
    assert [r["identical"] for r in rows[:2]] == [1, 1]
    assert rows[0]["speed_up"] == 1.0 != rows[3]["speed_up"]
    assert set(used) == {torch.float32, torch.bfloat16}
    assert used.count(torch.float32) == used.count(torch.bfloat16) >= 3  # three policies each


def test_results_are_written_although_the_table_is_not_printed(
    tiny_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("stdout is full")

    monkeypatch.setattr(bench_window, "_print", fail)
    file = tmp_path / "bench.json"
    assert bench(tiny_folder, "--policies", "jacobi", "--json", str(file)) == 1
    assert [row["policy"] for row in json.loads(file.read_text())["rows"]][1] == "jacobi"


def test_the_table_is_printed_although_results_are_not_written(
    tiny_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    def fail(self: Path, *_: Any, **__: Any) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(Path, "write_text", fail)
    file = tmp_path / "bench.json"
    assert bench(tiny_folder, "--policies", "jacobi", "--json", str(file)) == 1
    captured = capsys.readouterr()
    assert "jacobi 4" in captured.out and "disk is full" in captured.err and not file.exists()


def test_a_name_that_cannot_be_written_is_found_before_anything_is_measured(
    tiny_folder: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(bench_window, "measure_images", None)  # would not be callable
    assert bench(tiny_folder, "--json", str(tmp_path / ("x" * 250))) == 2
    assert "File name too long" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe")
    assert bench(tiny_folder, "--json", str(tmp_path / "pipe")) == 2
    assert "--json: expected a file name" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


@pytest.fixture(scope="module")
def grammar(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_toys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_grammar_model(grammar: Path, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    labels = "stepwise,lossless-unmask,maskgit 12"
    options = ["--model", str(grammar), "--policies", labels, "--count", "2", "--json", str(file)]
    assert main(["bench", "--family", "canvas", *options]) == 0
    plain, fast, relaxed = json.loads(file.read_text(encoding="utf-8"))["canvas"]
    n = 2 * len(TASKS)
    assert plain["rows"] == fast["rows"] == n and plain["same"] == fast["same"] == n
    assert fast["passes"] < plain["passes"] and fast["positions"] > plain["positions"]
    assert fast["quality"] == plain["quality"]
    assert relaxed["same"] is not None and relaxed["same"] < n
    assert 0 <= plain["quality"]["right"] <= 1 and set(TASKS) < set(plain["quality"])
    assert 0 < plain["quality"]["floor"] < plain["quality"]["total_variation"] <= 1


@pytest.mark.slow
def test_images_by_canvas_and_by_window(tmp_path: Path) -> None:
    """Processed tokens include both branches of guidance."""
    file, (source, _) = (
        tmp_path / "found.json",
        masked_beside_plain(tmp_path, 16, [*SCENE_WORDS], MAX_WORDS),
    )
    labels = "stepwise halton,lossless-unmask halton,autoregressive"
    options = ["--model", str(source), "--policies", labels, "--count", "1", "--json", str(file)]
    assert main(["bench", "--family", "canvas", *options]) == 0
    plain, fast, window = json.loads(file.read_text(encoding="utf-8"))["canvas"]
    assert plain["model"] == window["model"] == "masked"
    assert plain["passes"] == window["passes"] == 256 > fast["passes"]
    assert plain["same"] == fast["same"] == 1 and window["same"] is None
    assert fast["quality"] == plain["quality"] and set(window["quality"]) >= {"shapes", "whole"}
    assert 2 * 256 * 256 < plain["positions"] < 2 * 256 * (256 + 34)  # whole canvases
    assert 2 * 256 <= window["positions"] < 2 * (256 + 34)  # guidance doubles them


def test_what_was_measured_before_an_interrupt_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mmaccel.evaluation.exactness import canvas_enumeration as canvas_toys

    induced, calls = canvas_toys.enumerate_paths, [0]

    def stopped(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] > 6:  # the first policy takes six
            raise KeyboardInterrupt
        return induced(*args)

    monkeypatch.setattr(canvas_toys, "enumerate_paths", stopped)
    file = tmp_path / "found.json"
    options = ["--policies", "stepwise,threshold 0.9", "--json", str(file)]
    assert main(["bench", "--family", "canvas", "--model", "toys", *options]) == 130
    said = capsys.readouterr()
    assert "measured 1 of the policies" in said.err and "stepwise" in said.out
    (row,) = json.loads(file.read_text(encoding="utf-8"))["canvas"]
    assert row["policy"] == "stepwise"


def test_setups_that_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, beside = masked_beside_plain(tmp_path)
    options = ["bench", "--family", "canvas", "--count", "1", "--policies"]
    assert main([*options, "autoregressive", "--model", str(beside)]) == 2  # nothing masked
    assert "expected a masked model of images" in " ".join(capsys.readouterr().err.split())
    assert main([*options, "entropy-bounded 0.5 end", "--model", str(source)]) == 2
    assert "can run on" in capsys.readouterr().err and not capsys.readouterr().out


def test_models_run_on_the_device(
    grammar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def text(source: Path, device: str) -> GrammarText:
        seen.append(device)
        return GrammarText(source, device)

    def pipeline(name: str, load: LoadOptions) -> TextToImage:
        seen.append(load.device)
        return TextToImage.from_pretrained(name, device=load.device)

    monkeypatch.setattr(canvas_benchmark, "GrammarText", text)
    monkeypatch.setattr(loading, "open_pipeline", pipeline)
    words = [*SCENE_WORDS]
    masked, _ = masked_beside_plain(tmp_path / "tiny", 16, words, MAX_WORDS)
    file = tmp_path / "found.json"
    fixed = ["--policies", "maskgit 12", "--count", "1", "--device", "cpu:0", "--json", str(file)]
    for source in (grammar, masked):
        assert main(["bench", "--family", "canvas", "--model", str(source), *fixed]) == 0
        assert json.loads(file.read_text(encoding="utf-8"))["machine"]["device"] == "cpu:0"
    assert seen == ["cpu:0", "cpu:0"]


def test_answers_have_words_only(grammar: Path) -> None:
    text = GrammarText(grammar)
    prompt = text.prompt([e.prompt for e in make_examples(EVALUATION_SEED, range(3), "copy")])
    allowed = prompt.layout.allowed(torch.zeros(1, 1, dtype=torch.int64))  # type: ignore[union-attr]
    assert allowed.sum() == MASK - 3 and not allowed[[PAD, BOS, ASK]].any() and allowed[END]
    assert AnswerWords(MASK).forced(torch.zeros(1, 1)) is None
    filled = GrammarText.fill_up(torch.tensor([[5, END, 9], [5, 6, 7]]), torch.tensor([2, 3]))
    assert filled == [[5, END, END], [5, 6, 7]]
    assert not is_right(("copy", "a"), [5] * text.length)


def test_every_setup_is_a_policy() -> None:
    from mmaccel.catalog import find_policy, make_policy

    for name, options in SETUPS.values():
        assert find_policy(name).slot == getattr(make_policy(name, **options), "kind", "window")
