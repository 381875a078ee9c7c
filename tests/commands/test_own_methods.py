"""Methods of other people: `module:Name` where somebody typed it, entry points everywhere."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

import mmaccel
from mmaccel import OptionError
from mmaccel.batch.prompts import check_row
from mmaccel.batch.worker import Setup, settings_of
from mmaccel.catalog import find_policy, make, make_policy, read_policy
from mmaccel.cli import app, main
from mmaccel.comfy.methods import build_policy
from mmaccel.commands.bench.canvas import pick_setups
from mmaccel.commands.evaluate import evaluate
from mmaccel.commands.options import WindowPolicyFlags, merge_fields, parse_reducers
from mmaccel.own_code import TypedName, installed
from tests.architecture.source import ROOT
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import CAPTIONS
from tests.fixtures.tiny_vlms import encodes_first
from tests.fixtures.tiny_vqa import QUESTION, save_scenes, save_vqa

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BROKEN = """
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import mmaccel
from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.drafting.contract import DraftSource

Path("it-ran").touch()


class Plain:
    exactness = "bitwise"

    def sample(self): ...


@dataclass
class Thawed(WindowPolicy):
    exactness: ClassVar[str] = "bitwise"


@dataclass(frozen=True)
class Needy(WindowPolicy):
    back: int

    exactness: ClassVar[str] = "bitwise"


@dataclass(frozen=True)
class NeedySource(DraftSource):
    back: int


@dataclass(frozen=True)
class Filler:
    kind: ClassVar[str] = "canvas"
    exactness: ClassVar[str] = "relaxed"

    def sample(self): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, with the modules `mine` of docs/extending.md, `broken` and `raises`."""
    blocks = re.findall(r"^```python\n(# mine\.py\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 7
    (tmp_path / "mine.py").write_text("\n".join(blocks), encoding="utf-8")
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    (tmp_path / "raises.py").write_text("import nothing_of_this_name", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    before = list(sys.path)
    sys.modules.pop("mine", None)  # another folder's
    yield tmp_path
    assert sys.path == before != [*path, str(tmp_path)]  # the folder was there for look-ups alone
    for name in ("mine", "broken", "raises"):
        sys.modules.pop(name, None)


def run(*arguments: object) -> int:
    return main([str(each) for each in arguments])


def test_generate_and_its_files(folder: Path, tiny_folder: Path, capsys: Any) -> None:
    options = ("--model", tiny_folder, "--out", "out", "--compare")
    own = ("--policy", "mine:ZeroDrafts", "--set", "window=5")
    assert run("generate", CAPTIONS[0], *own, *options) == 0
    assert "The same image, token for token" in capsys.readouterr().out
    names = [file.name for file in Path("out").iterdir()]
    assert sorted(name.split("-")[-2] for name in names) == ["ZeroDrafts"] * 2
    assert run("generate", CAPTIONS[0], "--drafts", "mine:LookBack", *options) == 0
    assert "The same image, token for token" in capsys.readouterr().out


def test_bench_measures_both(folder: Path, tiny_folder: Path) -> None:
    options = ("--windows", "4", "--guidance", "1", "--count", "1", "--model", tiny_folder)
    own = (CAPTIONS[0], "--policies", "jacobi,mine:ZeroDrafts", "--drafts", "left,mine:LookBack")
    assert run("bench", *own, *options, "--json", "a.json") == 0
    rows = json.loads(Path("a.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["policy"], row["drafts"]) for row in rows[1:]] == [
        ("jacobi", "left"),
        ("jacobi", "LookBack(back=16)"),
        ("mine:ZeroDrafts", None),
    ]
    assert [row["identical"] for row in rows] == [1] * 4


def test_evaluate_exactness_and_speed(folder: Path, tiny_folder: Path) -> None:
    fixed = (tiny_folder, "--policy", "mine:ZeroDrafts", "--set", "window=4")
    own = ("--count", "2", "--batch-size", "2", "--samples", "0", "--json", "a.json")
    assert run("evaluate", "exactness", *fixed, *own) == 0
    report = json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert report["policy"] == "ZeroDrafts(window=4)" and report["broken"] == []
    own = ("--batch-sizes", "1", "--warm-up", "1", "--no-plots", "--out", "speed")
    assert run("evaluate", "speed", *fixed, *own) == 0
    report = json.loads(Path("speed/speed.json").read_text(encoding="utf-8"))
    assert report["policy"] == "ZeroDrafts(window=4)"
    chosen = merge_fields({}, ["drafts=mine:LookBack"])  # these commands have no --drafts
    assert repr(make_policy("jacobi", **chosen)) == "Jacobi(window=32, drafts=LookBack(back=16))"


@pytest.mark.skipif(
    not encodes_first(), reason="this transformers encodes images in its first pass"
)
def test_answer_and_evaluate_visual_tokens(folder: Path, capsys: Any) -> None:
    model, image = save_vqa(folder / "vqa"), save_scenes(folder)[0]
    fixed = ("--model", model, "--max-tokens", 2, "--json", "a.json")
    assert run("answer", image, QUESTION, "--visual-tokens", "mine:Unusual:keep=0.5", *fixed) == 0
    report = json.loads(Path("a.json").read_text(encoding="utf-8"))
    (found,) = report["runs"]
    assert found["visual_tokens"] == "Unusual 0.5" and found["n_kept"] == 250  # of 500
    assert re.search(r"-Unusual-\w{8}\.png$", report["picture"])
    asked = {"image": image.name, "question": QUESTION, "answer": "red", "kind": "a"}
    Path("data.jsonl").write_text(json.dumps(asked) + "\n", encoding="utf-8")
    options = ("--methods", "mine:Unusual", "--keep", "0.5", "--data", "data.jsonl")
    assert run("evaluate", "visual-tokens", model, *options, "--json", "b.json") == 0
    sides = json.loads(Path("b.json").read_text(encoding="utf-8"))["sides"]
    assert "mine:Unusual" in [side["method"] for side in sides]


def test_a_job_of_a_prompt_file(folder: Path, tiny_folder: Path) -> None:
    Path("rows.jsonl").write_text('{"prompt": "a red circle"}\n', encoding="utf-8")
    options = ("--prompts", "rows.jsonl", "--model", tiny_folder, "--out", "out")
    assert run("generate", "--policy", "mine:ZeroDrafts", *options) == 0
    (line,) = Path("out/manifest.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["policy"] == "mine:ZeroDrafts"


def test_speech_clips_and_canvas_setups(folder: Path) -> None:
    typed = WindowPolicyFlags(policy=TypedName("mine:ZeroDrafts"), window="7")
    name, policy = typed.choose("window")
    assert name == "mine:ZeroDrafts" and repr(policy) == "ZeroDrafts(window=7)"
    typed = WindowPolicyFlags(drafts=TypedName("mine:LookBack"))
    assert repr(typed.choose("window")[1]) == "Jacobi(window=32, drafts=LookBack(back=16))"
    assert type(pick_setups(["broken:Filler"])["broken:Filler"]).__name__ == "Filler"
    assert find_policy(TypedName("broken:Filler")).slot == "canvas"


def test_every_command_knows_what_was_typed() -> None:
    """An option that gives a plain `str` would refuse every `module:Name`."""
    listed = [*app.registered_commands, *evaluate.registered_commands]
    found = {
        (command.callback.__name__, option)
        for command in listed
        for option, hint in get_type_hints(command.callback, include_extras=True).items()
        if any(
            getattr(note, "parser", None) is TypedName for note in getattr(hint, "__metadata__", ())
        )
    }
    commands = ("generate", "speak", "animate", "answer", "serve", "exactness", "speed")
    assert found == {(name, option) for name in commands for option in ("policy", "drafts", "tree")}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine:Zerodrafts", "mine.py has no 'Zerodrafts'); did you mean ZeroDrafts?"),
        ("nowhere:Policy", "no module of that name here or installed; go to its folder"),
        ("mine.sub:Policy", "no module of that name here or installed; go to its folder"),
        ("raises:Policy", "importing it raises ModuleNotFoundError: No module named 'nothing_of_"),
        ("mine:", "write for example mine:MyOwn, of a file mine.py"),
        ("a b:C", "write for example mine:MyOwn, of a file mine.py"),
        ("broken:Plain", "expected a frozen dataclass with exactness and sample, such as a child "
         "of WindowPolicy or SelectorPolicy, received 'broken:Plain', a class that is no data"),
        ("broken:Thawed", "a dataclass that is not frozen, a child of WindowPolicy; see docs/"),
        ("broken:mmaccel", "received 'broken:mmaccel', a module; see docs/extending.md"),
        ("mine:LookBack", "received 'mine:LookBack', a frozen dataclass, a child of DraftSource"),
        ("broken:Needy", "policy broken:Needy: expected a value for back, which has no default"),
    ],
)  # fmt: skip
def test_what_is_no_policy_is_said_in_one_line(
    name: str, said: str, folder: Path, capsys: Any
) -> None:
    assert run("generate", CAPTIONS[0], "--policy", name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mmaccel: policy") and said in line and not Path("out").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine:ZeroDrafts", "drafts: expected a frozen dataclass that is a child of DraftSource"),
        ("mine:Missing", "drafts: expected module:Name, received 'mine:Missing'"),
        ("broken:NeedySource", "drafts broken:NeedySource: expected a value for back"),
    ],
)
def test_what_is_no_draft_source(name: str, said: str, folder: Path, capsys: Any) -> None:
    assert run("generate", CAPTIONS[0], "--policy", "sjd", "--drafts", name) == 2
    assert said in capsys.readouterr().err


def test_what_is_no_reducer(folder: Path) -> None:
    with pytest.raises(OptionError, match="visual_tokens: .* a child of TokenReducer, received"):
        parse_reducers(["mine:ZeroDrafts"], 0.5, None)
    with pytest.raises(OptionError, match="visual_tokens mine:Unusual: expected options out of"):
        parse_reducers(["mine:Unusual:layer=3"], 0.5, None)
    (made,) = parse_reducers(["mine:Unusual"], None, 7)
    assert repr(made) == "Unusual(keep=None, n_keep=7)"


def test_what_nobody_typed_is_not_imported(folder: Path, tiny_folder: Path, capsys: Any) -> None:
    """Rows of prompt files and requests, workflows, and strings in a program."""
    pipe = mmaccel.TextToImage.from_pretrained(tiny_folder)
    setup = Setup(str(tiny_folder), folder)
    row = {"prompt": "a red circle", "params": {"drafts": "broken:NeedySource"}}
    item: Any = SimpleNamespace(row=check_row(row))
    for call in (
        lambda: check_row({"prompt": "a red circle", "policy": "broken:Needy"}),
        lambda: settings_of(setup, item, pipe),
        lambda: make_policy("broken:Needy", back=1),
        lambda: read_policy({"name": "broken:Needy", "back": 1}),
        lambda: mmaccel.attach(build_lm("llama"), "broken:Needy"),
        lambda: make_policy("jacobi", drafts="broken:NeedySource"),
        lambda: make("visual_tokens", "broken:Needy", keep=0.5),
        lambda: build_policy("jacobi", drafts="broken:NeedySource"),
    ):
        with pytest.raises(OptionError, match="is taken from the command line alone"):
            call()
    Path("rows.csv").write_text("prompt,policy\na red circle,broken:Needy\n", encoding="utf-8")
    assert run("generate", "--prompts", "rows.csv", "--model", tiny_folder, "--dry-run") == 2
    assert "line 2: policy: expected one of" in capsys.readouterr().err
    assert not Path("it-ran").exists() and "broken" not in sys.modules


def test_a_module_of_the_folder_does_not_hide_an_installed_one(folder: Path, capsys: Any) -> None:
    Path("colorsys.py").write_text("open('it-ran', 'w')", encoding="utf-8")  # of the library
    sys.modules.pop("colorsys", None)
    assert run("generate", CAPTIONS[0], "--policy", "colorsys:Policy") == 2
    assert "colorsys.py has no 'Policy'" in capsys.readouterr().err
    assert not Path("it-ran").exists()


@pytest.fixture
def packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with methods of its own, two of them under names of ours."""
    brought = {
        "policies": {"zero-drafts": "mine:ZeroDrafts", "jacobi": "broken:Plain"},
        "drafts": {"look-back": "mine:LookBack", "left": "broken:Plain"},
        "reducers": {"unusual": "mine:Unusual"},
    }
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda group: [
            SimpleNamespace(name=name, value=value)
            for name, value in brought.get(group.removeprefix("mmaccel."), {}).items()
        ],
    )
    installed.cache_clear()
    yield
    installed.cache_clear()


def test_entry_points_are_taken_everywhere(packages: None, tiny_folder: Path, capsys: Any) -> None:
    assert repr(make_policy("zero-drafts")) == "ZeroDrafts(window=8)"
    row = {"prompt": "a red circle", "policy": "zero-drafts"}
    assert check_row(row).policy == "zero-drafts"
    assert repr(read_policy({"name": "sjd", "drafts": "look-back"}).drafts) == "LookBack(back=16)"
    assert repr(make("visual_tokens", "unusual", keep=0.5)) == "Unusual(keep=0.5, n_keep=None)"
    options = ("--model", tiny_folder, "--out", "out", "--policy", "zero-drafts")
    assert run("generate", CAPTIONS[0], *options) == 0
    assert run("models") == 0 and "zero-drafts" in capsys.readouterr().out


def test_our_short_names_come_first(packages: None) -> None:
    assert make_policy("jacobi", drafts="left") == mmaccel.Jacobi(drafts="left")
