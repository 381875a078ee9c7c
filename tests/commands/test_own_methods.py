"""Methods of other people: `module:Name` where somebody typed it, entry points everywhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

import mmaccel
from mmaccel import OptionError
from mmaccel.batch.modalities import Images
from mmaccel.batch.prompts import check_row, make_items
from mmaccel.catalog import find_policy, make, make_policy, read_policy
from mmaccel.cli import app, main
from mmaccel.commands.evaluate import evaluate
from mmaccel.commands.options import WindowPolicyFlags, parse_reducers
from mmaccel.own_code import TypedName, installed
from tests.architecture.source import ROOT
from tests.fixtures.jobs import Command, pipe, records
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import CAPTIONS

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BROKEN = """
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mmaccel.samplers.window.policy import WindowPolicy
from mmaccel.samplers.drafting.contract import DraftSource

Path("it-ran").touch()


class Plain:
    exactness = "bitwise"

    def sample(self): ...


@dataclass(frozen=True)
class Needy(WindowPolicy):
    back: int

    exactness: ClassVar[str] = "bitwise"


@dataclass(frozen=True)
class NeedySource(DraftSource):
    back: int
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """In a working folder with the modules `mine` of docs/extending.md, `broken` and `raises`."""
    blocks = re.findall(r"^```python\n(# mine\.py\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    (tmp_path / "mine.py").write_text("\n".join(blocks), encoding="utf-8")
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    (tmp_path / "raises.py").write_text("import nothing_of_this_name", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    before = list(sys.path)
    sys.modules.pop("mine", None)  # another folder's
    yield Command("images", tmp_path)
    assert sys.path == before  # the folder was there for look-ups alone
    for name in ("mine", "broken", "raises"):
        sys.modules.pop(name, None)


def test_generate_and_its_files(command: Command, capsys: Any) -> None:
    own = ("--policy", "mine:ZeroDrafts", "--set", "window=5")
    assert command.make(1, *own, "--compare") == 0
    assert "The same image, token for token" in capsys.readouterr().out
    names = [file.name for file in command.out.iterdir()]
    assert sorted(name.split("-")[-2] for name in names) == ["ZeroDrafts"] * 2
    assert command.make(1, "--drafts", "mine:LookBack", "--compare") == 0
    assert "The same image, token for token" in capsys.readouterr().out
    assert command.job(*own, rows=[{"prompt": CAPTIONS[0]}]) == 0
    assert [record["policy"] for record in records(command.out)] == ["mine:ZeroDrafts"]


def test_every_command_knows_what_was_typed(command: Command) -> None:
    """An option that gives a plain `str` would refuse every `module:Name`."""
    listed = [*app.registered_commands, *evaluate.registered_commands]
    found = {
        (each.callback.__name__, option)
        for each in listed
        for option, hint in get_type_hints(each.callback, include_extras=True).items()
        if any(
            getattr(note, "parser", None) is TypedName for note in getattr(hint, "__metadata__", ())
        )
    }
    commands = ("generate", "speak", "animate", "answer", "serve", "exactness", "speed")
    assert found == {(name, option) for name in commands for option in ("policy", "drafts", "tree")}
    typed = WindowPolicyFlags(drafts=TypedName("mine:LookBack"))
    assert repr(typed.choose()[1]) == "Jacobi(window=32, drafts=LookBack(back=16))"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--policy mine:Zerodrafts", "mine.py has no 'Zerodrafts'); did you mean ZeroDrafts?"),
        ("--policy raises:Policy", "importing it raises ModuleNotFoundError: No module named"),
        ("--policy broken:Plain", "expected a frozen dataclass with exactness and sample"),
        ("--policy broken:Needy", "policy broken:Needy: expected a value for back, which has no"),
        ("--policy sjd --drafts mine:ZeroDrafts", "drafts: expected a frozen dataclass that is"),
        ("--policy colorsys:Policy", "colorsys.py has no 'Policy'"),  # not the folder's
    ],
)
def test_what_is_no_method_is_said_in_one_line(
    options: str, said: str, command: Command, capsys: Any
) -> None:
    Path("colorsys.py").write_text("open('it-ran', 'w')", encoding="utf-8")  # of the library too
    assert command.make(1, *options.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and not command.out.exists()
    assert Path("it-ran").exists() == ("broken" in options)


def test_what_is_no_reducer(command: Command) -> None:
    with pytest.raises(OptionError, match="visual_tokens: .* a child of TokenReducer, received"):
        parse_reducers(["mine:ZeroDrafts"], 0.5, None)
    (made,) = parse_reducers(["mine:Unusual"], None, 7)
    assert repr(made) == "Unusual(keep=None, n_keep=7)"


def test_what_nobody_typed_is_not_imported(command: Command, capsys: Any) -> None:
    """Rows of prompt files and requests, and strings in a program."""
    row = {"prompt": "a red circle", "params": {"drafts": "broken:NeedySource"}}
    (item,) = make_items([check_row(row)], 0)
    for call in (
        lambda: check_row({"prompt": "a red circle", "policy": "broken:Needy"}),
        lambda: Images(model="tiny").plan(item, pipe("images")),
        lambda: read_policy({"name": "broken:Needy", "back": 1}),
        lambda: mmaccel.attach(build_lm("llama"), "broken:Needy"),
        lambda: make_policy("jacobi", drafts="broken:NeedySource"),
    ):
        with pytest.raises(OptionError, match="is taken from the command line alone"):
            call()
    rows = [{"prompt": "a red circle", "policy": "broken:Needy"}]
    assert command.job("--dry-run", rows=rows) == 2
    assert "line 1: policy: expected one of" in capsys.readouterr().err
    assert not Path("it-ran").exists() and "broken" not in sys.modules


def test_entry_points_are_taken_everywhere_and_our_names_come_first(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
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
    try:
        assert repr(make_policy("zero-drafts")) == "ZeroDrafts(window=8)"
        read = read_policy({"name": "sjd", "drafts": "look-back"})
        assert repr(read.drafts) == "LookBack(back=16)"
        assert repr(make("visual_tokens", "unusual", keep=0.5)) == "Unusual(keep=0.5, n_keep=None)"
        assert command.job(rows=[{"prompt": "a red circle", "policy": "zero-drafts"}]) == 0
        assert main(["models"]) == 0 and "zero-drafts" in capsys.readouterr().out
        assert find_policy("zero-drafts").slot == "window"
        assert make_policy("jacobi", drafts="left") == mmaccel.Jacobi(drafts="left")
    finally:
        installed.cache_clear()
