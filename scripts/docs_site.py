"""What mkdocs needs beyond `mkdocs.yml`: the models' cards as pages, and the layout of the sources.

`on_files` and `on_page_markdown` are hooks of mkdocs; `Layout` is an extension of griffe, the part
of mkdocstrings that reads Python files and imports none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "tokenizers_vq", "samplers", "pipelines")  # installed inside mmaccel
_CARD = re.compile(r"\]\(\.\./mmaccel/demo/weights/([\w-]+)/README\.md\)")
_OTHER_CARD = re.compile(r"\]\(\.\./([\w-]+)/README\.md\)")
_TOGETHER = re.compile(r"^(    )(\w+(?:, \w+)+)(:.*(?:\n {5,}.*)*)", re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the card of each model that ships as a page, `cards/NAME.md`."""
    for card in sorted((ROOT / "mmaccel" / "demo" / "weights").glob("*/README.md")):
        name = f"cards/{card.parent.name}.md"
        files.append(File.generated(config, name, abs_src_path=str(card)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Makes links to cards, as they are right in the repository, links to these pages."""
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
        for docstring in _docstrings(pkg):
            docstring.value = split_parameters(docstring.value)


def split_parameters(text: str) -> str:
    """A docstring in which parameters that share an entry (`device, dtype: …`) have one each."""
    return _TOGETHER.sub(lambda m: "\n".join(m[1] + name + m[3] for name in m[2].split(", ")), text)


def _docstrings(item: griffe.Object) -> Iterator[griffe.Docstring]:
    if item.docstring is not None:
        yield item.docstring
    for member in item.members.values():
        if isinstance(member, griffe.Object):
            yield from _docstrings(member)
