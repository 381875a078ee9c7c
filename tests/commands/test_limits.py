"""What no option takes: too many, too deep, too long, devices that are none, raw escapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmaccel.cli import main
from mmaccel.commands.terminal import make_table, printable, wide_console
from mmaccel.errors import OptionError
from mmaccel.evaluation.quality.features import load_callable
from mmaccel.limits import is_deeper, parse_json
from mmaccel.pipelines.loading.placement import choose_placement

LONG = "9" * 5000
BAD: list[tuple[str, list[str], str]] = [  # command, options, message
    (
        "generate x",
        ["--count", "1000000000"],
        "--num-images: expected at most 100000, received 1000000",
    ),
    ("generate x", ["--batch-size", "1000000000"], "--batch-size: expected at most 65536"),
    ("generate --prompts p.txt", ["--retries", "1000000"], "--retries: expected at most 1000"),
    ("animate a.png --model x", ["--count", "1000000000"], "--count: expected at most 100000"),
    ("bench", ["--count", "1000000000"], "--count: expected at most 10000"),
    ("bench", ["--windows", ",".join(map(str, range(1001)))], "--windows: expected at most 1000"),
    (
        "evaluate exactness",
        ["--samples", "1000000000"],
        "--samples: expected an integer in 1000..10000000",
    ),
    ("evaluate speed", ["--runs", "1000000000"], "--runs: expected an integer in 20..100000"),
    ("evaluate speed", ["--batch-sizes", LONG], "--batch-sizes: expected an integer in 1..65536"),
    ("generate x", ["--size", f"{LONG}x{LONG}"], "--size: expected pixels"),
    ("generate x", ["--size", "99999x64"], "up to 16384, received '99999x64'"),
    ("generate x", ["--window", LONG], "window: expected an integer in 1..4096"),
    ("generate x", ["--seed", "9" * 4000], "seed: expected a 64-bit integer"),
    ("generate x", ["--set", "window={[]:1}"], "window: expected an integer in 1..4096"),
    (
        "generate x",
        ["--set", f"window=0x{'f' * 5000}"],
        "window: expected integers of at most 40",
    ),
    ("generate x", ["--set", f"window={'[' * 2000}"], "window: expected at most 16 brackets"),
    ("generate x", ["--set", f"window={'-' * 9000}1"], "window: expected an integer in 1..4096"),
    (
        "generate x",
        ["--set", f"window={'x' * 20_000}"],
        "window: expected at most 10000 characters",
    ),
    (
        "generate x",
        ["--device", "hpu"],
        "device: expected a device of this machine, received 'hpu'",
    ),
    ("generate x", ["--device", "\x1b[31mcuda"], r"received '\x1b[31mcuda'"),
    ("generate x", ["--out", LONG], "--out: expected a name that this system takes"),
    ("generate x", ["--out", "short/" * 1000], "--out: expected a name that this system takes"),
    ("generate x", ["--out", f"new/{LONG}"], "--out: expected a name that this system takes"),
    ("speak x --model y", ["--out", LONG], "--out: expected a name that this system takes"),
    ("gallery", [LONG], "expected a name that this system takes"),
    ("doctor", ["--out", LONG], "expected a name that this system takes"),
]


@pytest.mark.parametrize(("command", "options", "message"), BAD, ids=range(len(BAD)))
def test_it_is_refused_with_the_limit(
    command: str, options: list[str], message: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = ["--policy", "jacobi"] if {"--set", "--window"} & {*options} else []
    assert main([*command.split(), *options, *policy]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and len(said.err) < 1000
    assert "\x1b" not in said.out + said.err
    assert list(tmp_path.iterdir()) == []


DEVICES = "hpu xla xpu mps vulkan meta ipu fpga privateuseone lazy mtia opencl x".split()


@pytest.mark.parametrize("name", [*DEVICES, "", "cuda:99999999999", "\x1b[2J"])
def test_a_device_that_is_none_is_refused(name: str) -> None:
    import torch

    with pytest.raises(OptionError, match="device: expected a device of this machine"):
        choose_placement(name, torch.float32)


def test_markup_and_escapes_of_users_are_shown_as_text(capsys) -> None:
    table = make_table("what", "\x1b[2Jhead", title="[/nope]\x1b]0;title\x07")
    table.add_row("[red]x[/nope]", ":smile:\x9b31m")
    console = wide_console()
    console.print(table)
    console.print("[/] \x1b[31m \u202eabc")
    said = capsys.readouterr().out
    assert all(
        text in said for text in ("[red]x[/nope]", "[/nope]", ":smile:", "[/] ", r"\x1b[31m")
    )
    assert not any(c in said for c in ("\x1b[31m", "\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e"))


def test_doctor_prints_the_name_of_a_model_as_it_is(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--model", "[red]x[/nope]\x1b[2J"]) == 1
    said = capsys.readouterr().out
    assert "[red]x[/nope]" in said and "\x1b" not in said


def test_what_is_printable() -> None:
    kept = "caf\u00e9 \u4e2d\u6587 \u00a0 \U0001f469\u200d\U0001f680\n"
    assert printable(kept) == kept
    assert printable("\x1b[2J\x9b\u202e\u2028\udcff") == r"\x1b[2J\x9b\u202e\u2028\udcff"


def test_json_has_a_depth_and_integers_have_digits() -> None:
    assert parse_json('{"a": "' + "[" * 999 + '"}') == {"a": "[" * 999}
    assert parse_json("[" * 64 + "]" * 64) and parse_json("9" * 40) == 10**40 - 1
    for text in ("[" * 65 + "]" * 65, "[" * 1_000_000, '{"a":' * 70 + "1" + "}" * 70, "9" * 41):
        with pytest.raises(ValueError, match="more than (64|40)"):
            parse_json(text)
    assert not is_deeper("[]" * 1000, 16) and is_deeper("([{" * 6, 16)
    assert not is_deeper(r'"\"[[[[' + "[" * 99, 16)  # within quotes that do not end


DEEP = {
    "a manifest": ("pictures/manifest.jsonl", ["gallery", "pictures"]),
    "a list of images": ("pictures/prompts.jsonl", ["evaluate", "pictures", "pictures"]),
    "a suite's lines": ("p", ["evaluate", "export", "pictures", "--suite", "geneval"]),
    "a suite's list": ("p", ["evaluate", "export", "pictures", "--suite", "hpsv2"]),
    "a node pack": ("ui/custom_nodes/mmaccel-nodes/.mmaccel.json", ["comfy", "ui"]),
    "prompts": ("q.jsonl", ["generate", "--prompts", "q.jsonl", "--dry-run"]),
}


@pytest.mark.parametrize("depth", [500, 50_000])
@pytest.mark.parametrize("kind", DEEP)
def test_deep_json_is_refused(kind: str, depth: int, tmp_path: Path, monkeypatch, capsys) -> None:
    from PIL import Image

    name, arguments = DEEP[kind]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (8, 8)).save("pictures/a.png")
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    record = {"id": "a", "k": 0, "status": "ok", "file": "a.png", "prompt": "x", "seed": 0}
    text = json.dumps(record | {"policy": "jacobi", "versions": 0})
    (tmp_path / name).write_text(
        text.replace('"versions": 0', f'"versions": {"[" * depth}{"]" * depth}')
    )
    more = ["--prompts", "p", "--out", "o"] if "export" in arguments else []
    assert main([*arguments, *more]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["raises", "leaves", "unprintable", "recursive"])
def test_a_callable_that_raises_is_named(name: str) -> None:
    called = load_callable(f"tests.fuzz.callables:{name}", "features")
    with pytest.raises(OptionError, match=rf"features: expected .*:{name}' to return for 2 items"):
        called([1, 2])


@pytest.mark.parametrize(
    "name",
    ["tests.fuzz.raising:f", "tests.fuzz.leaving:f", "tests.fuzz.callables:absent", "a..b:c", ":",
     "tests.fuzz.callables:number", "", "x" * 9000 + ":f", "\x1b[2J:f"],
)  # fmt: skip
def test_what_is_no_callable_is_named(name: str) -> None:
    with pytest.raises(OptionError, match="features: expected module:function, received"):
        load_callable(name, "features")
