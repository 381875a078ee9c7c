"""docs/: links lead somewhere, options exist, the reference has every public name.

`mkdocs build --strict` (`bash scripts/test.sh`) checks anchors and that docstrings fit their
signatures.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import mmaccel
from benchmarks import method_pages
from mmaccel.catalog import METHODS, load
from tests.architecture.source import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
# options of other programs that stand alone in a text
FOREIGN = {"--base-directory"}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_local_links_exist(page: Path) -> None:
    text = without_blocks(page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'src="([^"]+)"', text)
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (page.parent / link).exists()] == []
    scripts = re.findall(r"\bscripts/[\w/]+\.(?:sh|py)", text)
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: object) -> Iterator[str]:
        for value in entry.values() if isinstance(entry, dict) else entry:  # type: ignore[union-attr]
            yield from [value] if isinstance(value, str) else pages(value)

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages(nav)) == [page.relative_to(DOCS).as_posix() for page in PAGES]


def test_every_public_name_is_in_the_reference() -> None:
    from scripts.docs_site import expand_references

    text = expand_references((DOCS / "api.md").read_text("utf-8"))
    shown = re.findall(r"^::: mmaccel\.(\w+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted(set(mmaccel.__all__) - {"__version__"})


@pytest.mark.parametrize("slot", METHODS)
def test_every_method_has_its_section(slot: str) -> None:
    """Written by `scripts/update_docs.py` from its docstring and its row in the catalog."""
    text = (DOCS / method_pages.PAGES[slot]).read_text("utf-8")
    titles = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert {entry.class_name for entry in METHODS[slot].values()} <= set(titles)


@dataclass(frozen=True)
class Method:
    """Halves what it is given.

    Args:
        share: of it.

    Departures: none, but
    two lines.
    Loses: on odd numbers.
    """

    share: float = 0.5


def test_a_section_says_what_the_docstrings_say() -> None:
    """The head of this file has no paper and no departures; the class has."""
    text = method_pages.section(Method, "Method", ['`"half"`'])
    assert text == (
        "### Method\n\nHalves what it is given.\n\n"
        '`"half"`; `tests/architecture/test_docs.py`.\n\n'
        "- *Departures*: none, but two lines.\n- *Loses*: on odd numbers."
    )
    snapkv = method_pages.section(load(METHODS["kv_cache"]["snapkv"].target), "SnapKV", [])
    paper = "[arXiv 2404.14469](https://arxiv.org/abs/2404.14469), section 4"
    call = "[`SnapKV(budget=1024, window=32, kernel=7, every=None)`](api.md#mmaccel.SnapKV)"
    assert (
        call in snapkv
        and paper in snapkv
        and "**relaxed**" in snapkv
        and "- *Departures*: " in snapkv
    )


def test_parameters_that_share_an_entry_are_shown_one_by_one() -> None:
    from scripts.docs_site import split_parameters

    text = (
        "Load.\n\nArgs:\n    name: of it.\n    device,\n        dtype: where, and\n        in what."
    )
    assert split_parameters(text) == (
        "Load.\n\nArgs:\n    name: of it.\n    device: where, and\n        in what.\n"
        "    dtype: where, and\n        in what."
    )


@cache
def command_line() -> Any:
    from mmaccel.cli import app

    return typer.main.get_command(app)


def options_of(command: Any) -> set[str]:
    found = {"--help"}
    for parameter in command.params:
        found |= {*parameter.opts, *parameter.secondary_opts}
    return found


def find_command(words: list[str]) -> Any:
    """The command that `mmaccel` with these words runs."""
    command = command_line()
    for word in words:
        commands = getattr(command, "commands", None)  # of a group
        if commands is None or word.startswith("-"):
            break
        assert word in commands, f"no command {word!r}"
        command = commands[word]
    return command


@cache
def all_options() -> set[str]:
    """Options of all commands, and of the scripts of this repository."""

    def walk(command: Any) -> Iterator[str]:
        yield from options_of(command)
        for child in getattr(command, "commands", {}).values():
            yield from walk(child)

    found = set(walk(command_line()))
    for folder in ("scripts", "benchmarks", "tests/borrowed"):
        for file in (ROOT / folder).rglob("*.*"):
            if file.suffix in (".py", ".sh"):
                found |= set(re.findall(r"--[a-z][a-z-]*", file.read_text(encoding="utf-8")))
    return found


def calls(text: str) -> Iterator[list[str]]:
    """Words of each call of `mmaccel` in a text's blocks for a shell and in its code spans."""
    blocks = re.findall(r"^```(?:bash|yaml)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`(mmaccel [^`\n]+)`", without_blocks(text))
    for line in lines:
        found = re.search(r"(?:^|[\s'])mmaccel ((?:[a-z]|--)[^#]*)", line)
        if found:
            yield re.split(r"\s+", found[1].replace("'", " ").strip())


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_calls_have_commands_and_options_that_exist(page: Path) -> None:
    wrong = []
    for words in calls(page.read_text(encoding="utf-8")):
        known = options_of(find_command(words))
        used = [word.split("=")[0] for word in words if OPTION.match(word)]
        wrong += [
            f"{option} in mmaccel {shlex.join(words)}" for option in used if option not in known
        ]
    assert wrong == []


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_options_named_alone_exist(page: Path) -> None:
    text = without_blocks(page.read_text(encoding="utf-8"))
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if span.startswith("--")]
    used = {option for span in spans for option in OPTION.findall(span)}
    assert used - all_options() - FOREIGN == set()
