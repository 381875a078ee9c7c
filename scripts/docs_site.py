"""What mkdocs needs beyond `mkdocs.yml`: what the reference lists, the models' cards as pages, and
the layout of the sources.

`on_files` and `on_page_markdown` are hooks of mkdocs; `Layout` is an extension of
griffe, the part of mkdocstrings that reads Python files and imports none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mmaccel  # noqa: E402
from benchmarks.method_pages import classes  # noqa: E402

FOLDERS = ("kernels", "tokenizers_vq", "samplers", "pipelines")  # installed inside mmaccel
WEIGHTS = (ROOT / "mmaccel" / "demo" / "weights", ROOT / "scripts" / "training" / "weights")
_CARD = re.compile(r"\]\(\.\./(?:mmaccel/demo|scripts/training)/weights/([\w-]+)/README\.md\)")
_OTHER_CARD = re.compile(r"\]\(\.\./([\w-]+)/README\.md\)")
_REFERENCES = re.compile(r"^<!-- (methods|api|fields): ([^>]+) -->$", re.MULTILINE)
_DECLARED = ("within", "one_of")  # of mmaccel/checks.py
_TOGETHER = re.compile(r"^(    )(\w+(?:,\s+\w+)+)(:.*(?:\n {5,}.*)*)", re.MULTILINE)


def expand_references(markdown: str) -> str:
    """A page on which `methods: SLOT` stands for the methods of that slot, and `api:` and `fields:`
    for names below `mmaccel`, the former with their members.
    """

    def references(match: re.Match[str]) -> str:
        names = match[2].split()
        if match[1] == "methods":  # of some draft sources the short name is the only one
            names = [name for name in classes(match[2]) if name in mmaccel.__all__]
        lines = "\n    options:\n      heading_level: 3"
        lines += "" if match[1] == "api" else "\n      members: false"
        return "\n\n".join(f"::: mmaccel.{name}{lines}" for name in names)

    return _REFERENCES.sub(references, markdown)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the card of each model as a page, `cards/NAME.md`."""
    for card in (card for folder in WEIGHTS for card in sorted(folder.glob("*/README.md"))):
        name = f"cards/{card.parent.name}.md"
        files.append(File.generated(config, name, abs_src_path=str(card)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Lists names; links to cards, as they are right in the repository, lead to these pages."""
    markdown = expand_references(markdown)
    if page.file.src_uri.startswith("cards/"):
        return _OTHER_CARD.sub(r"](\1.md)", markdown)
    return _CARD.sub(r"](cards/\1.md)", markdown)


class Layout(griffe.Extension):
    """Puts the folders at the top of the repository into the package, as `mmaccel` does itself."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        if pkg.name != "mmaccel" or isinstance(pkg.filepath, list):
            return
        reader = griffe.GriffeLoader(
            extensions=griffe.Extensions(),  # those of `loader` follow, and see the whole package
            search_paths=[pkg.filepath.parent.parent],
            docstring_parser=loader.docstring_parser,
            docstring_options=loader.docstring_options,
            lines_collection=loader.lines_collection,
            modules_collection=loader.modules_collection,
            allow_inspection=False,
        )
        for folder in FOLDERS:
            pkg.set_member(folder, reader.load(folder))
        for member in _members(pkg):
            if isinstance(member, griffe.Function):
                show_fields(member)
            if isinstance(member, griffe.Attribute):
                member.value = plain_default(member.value)
            if member.docstring is not None:
                member.docstring.value = split_parameters(member.docstring.value)


def plain_default(value: str | griffe.Expr | None) -> str | griffe.Expr | None:
    """The default of a field that is declared with its range, as in `within(32, 1, hint="…")`."""
    is_declared = isinstance(value, griffe.ExprCall) and str(value.function) in _DECLARED
    return value.arguments[0] if is_declared and value.arguments else value


def split_parameters(text: str) -> str:
    """A docstring in which parameters that share an entry (`device, dtype: …`) have one each."""

    def entries(match: re.Match[str]) -> str:
        return "\n".join(match[1] + name + match[3] for name in re.split(r",\s+", match[2]))

    return _TOGETHER.sub(entries, text)


def show_fields(function: griffe.Function) -> None:
    """Give a method that `takes` a dataclass its fields as parameters, as at run time."""
    for decorator in function.decorators:
        if decorator.callable_path != "mmaccel.options.takes":
            continue
        options = function.resolve(str(decorator.value).removeprefix("takes(").removesuffix(")"))
        cls = function.modules_collection[options]
        fields = {
            name: member
            for base in (*reversed(cls.mro()), cls)
            for name, member in base.members.items()
            if member.is_attribute and "instance-attribute" in member.labels
        }
        parameters = [_parameter(member) for member in fields.values()]
        parameters.sort(key=lambda each: each.kind is griffe.ParameterKind.keyword_only)
        function.parameters = griffe.Parameters(function.parameters[0], *parameters)


def _parameter(field: griffe.Attribute) -> griffe.Parameter:
    value = str(field.value)
    default = value.removeprefix("option(").partition(",")[0].strip() if field.value else None
    is_positional = "kw_only=False" in value
    kind = griffe.ParameterKind
    return griffe.Parameter(
        field.name,
        annotation=field.annotation,
        kind=kind.positional_or_keyword if is_positional else kind.keyword_only,
        default=None if is_positional else default,
    )


def _members(item: griffe.Object) -> Iterator[griffe.Object]:
    """An object and all that it holds."""
    yield item
    for member in item.members.values():
        if isinstance(member, griffe.Object):
            yield from _members(member)
