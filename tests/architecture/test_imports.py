"""No module imports itself by way of others, and what a folder must never import.

Read on syntax trees, with imports in functions and without those for annotations alone, and on
strings that name a module. Two tables of names are no imports of the file that they stand in: the
catalog, and the public names of `mmaccel`. Kernels' backends are found by their files' names,
`x_numpy` and `x_triton`, by `mmaccel.kernels.dispatch`; they are not seen here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from functools import cache

import pytest

from tests.architecture.source import modules, named_in_strings, parse, resolved_imports

TABLES = ("mmaccel.catalog", "mmaccel")  # whose strings name modules


def folders(*names: str) -> tuple[str, ...]:
    """Of pipelines/."""
    return tuple(f"mmaccel.pipelines.{name}" for name in names)


def hosts(*names: str) -> tuple[str, ...]:
    """Of pipelines/hosts/."""
    return folders(*(f"hosts.{name}" for name in names))


MODALITIES = folders(
    "text_to_image", "text_to_speech", "text_to_video", "image_to_video", "image_to_text"
)
NEVER = {  # what -> folders that import, folders or modules that they never import
    "models do not know `attach`": (
        (*hosts("causal_lm", "prompt_cuts", "vision_language"), *folders("models")),
        (*hosts("attach"), "mmaccel.handle"),
    ),
    "runners do not know causal LMs": (hosts("runner"), hosts("causal_lm")),
    "hosts do not know modalities": (folders("hosts"), MODALITIES),
    "the seam inside the layers knows kernels and methods alone": (
        hosts("layers"),
        ("mmaccel.pipelines", "mmaccel.samplers", "mmaccel.tokenizers_vq"),
    ),
}


@cache
def sources() -> dict[str, str]:
    """Import name -> text, of all modules of the library."""
    return {name: file.read_text(encoding="utf-8") for name, file in modules().items()}


def graph(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> modules that it imports, by statements and by strings."""
    known = frozenset(texts)
    found = {}
    for name, text in texts.items():
        found[name] = resolved_imports(text, known)
        if name not in TABLES:
            found[name] |= {known for known in named_in_strings(text, known) if known in texts}
        found[name].discard(name)
    return found


@cache
def own_graph() -> dict[str, set[str]]:
    """The graph of the library."""
    return graph(sources())


def circles(imported: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of modules of which each reaches every other, sorted."""
    reached: dict[str, set[str]] = {}
    for name in imported:
        seen: set[str] = set()
        waiting = list(imported[name])
        while waiting:
            other = waiting.pop()
            if other not in seen:
                seen.add(other)
                waiting.extend(imported[other])
        reached[name] = seen
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in imported
        if name in reached[name]
    }
    return sorted(map(list, groups))


def drafting_modules(texts: Mapping[str, str]) -> set[str]:
    """Modules with a draft source or a drafter in them, apart from their contract."""
    bases = {"DraftSource", "Drafter"}
    found: set[str] = set()
    before = -1
    while before != len(bases):  # a child may be the parent of another
        before = len(bases)
        for name, text in texts.items():
            for node in ast.walk(parse(text)):
                if isinstance(node, ast.ClassDef):
                    if bases & {ast.unparse(base) for base in node.bases}:
                        bases.add(node.name)
                        found.add(name)
    return found


def is_in(module: str, folders: Iterable[str]) -> bool:
    """Whether a module is one of these, or lies in one of these folders."""
    return any(module == folder or module.startswith(f"{folder}.") for folder in folders)


def broken(texts: Mapping[str, str], imported: Mapping[str, set[str]]) -> list[str]:
    """Every import that must never be, as "rule: module imports module"."""
    found = []
    drafting = {name: text for name, text in texts.items() if ".samplers.drafting." in name}
    drafters = drafting_modules(drafting)
    for name, others in imported.items():
        for other in sorted(others):
            if name.startswith("mmaccel.samplers.window.") and other in drafters:
                found.append(f"the window loop knows no drafter: {name} imports {other}")
            if name.startswith("mmaccel.pipelines.") and other == "mmaccel":
                found.append(f"pipelines do not import the package's face: {name}")
            for what, (importers, forbidden) in NEVER.items():
                same = [folder for folder in importers if is_in(name, [folder])]
                if same and is_in(other, forbidden) and not is_in(other, same):
                    found.append(f"{what}: {name} imports {other}")
        if name not in TABLES:
            strings = named_in_strings(texts[name], frozenset(texts))
            found += [f"a string names a module: {name} has {text!r}" for text in sorted(strings)]
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circles(own_graph()) == []


def test_what_must_never_be_imported_is_not() -> None:
    assert broken(sources(), own_graph()) == []


def test_drafters_are_found() -> None:
    drafting = {k: v for k, v in sources().items() if k.startswith("mmaccel.samplers.drafting.")}
    found = {name.rpartition(".")[2] for name in drafting_modules(drafting)}
    assert {"copies", "ngram", "coarse", "coarse_drafter", "draft_model", "online"} <= found
    assert not found & {"contract", "sources", "copying", "states"}


@pytest.mark.parametrize(
    "source",
    [
        "from mmaccel.kernels.b import y",
        "import mmaccel.kernels.b",
        "from mmaccel.kernels import b",
        "def f():\n    from mmaccel.kernels.b import y",
        "import_module('mmaccel.kernels.b')",
        "load('mmaccel.kernels.b:Name')",
        "B = 'mmaccel.kernels.b:'\nload(f'{B}Name')",
        "load('mmaccel.kernels.b.Name')",
        "import mmaccel",
    ],
)
def test_a_circle_is_found(source: str) -> None:
    texts = {
        "mmaccel": "from mmaccel.kernels.b import y",
        "mmaccel.kernels.a": source,
        "mmaccel.kernels.b": "def f():\n    from mmaccel.kernels.c import x",
        "mmaccel.kernels.c": "import mmaccel.kernels.a",
        "mmaccel.kernels.d": "from mmaccel.kernels import a",
    }
    (found,) = circles(graph(texts))
    assert set(found) >= {"mmaccel.kernels.a", "mmaccel.kernels.b", "mmaccel.kernels.c"}
    assert "mmaccel.kernels.d" not in found


def test_imports_for_annotations_make_no_circle() -> None:
    back = "if TYPE_CHECKING:\n    from mmaccel.kernels.a import A"
    texts = {"mmaccel.kernels.a": "import mmaccel.kernels.b", "mmaccel.kernels.b": back}
    assert circles(graph(texts)) == []


def test_tables_of_names_make_no_circle() -> None:
    table = "NAMES = {'a': 'mmaccel.kernels.a:A'}"
    texts = {"mmaccel.catalog": table, "mmaccel.kernels.a": "from mmaccel.catalog import NAMES"}
    assert circles(graph(texts)) == []
    assert broken(texts, graph(texts)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mmaccel.samplers.window.x", "from mmaccel.samplers.drafting.ngram import NGram"),
        ("mmaccel.samplers.window.x", "def f():\n    from mmaccel.samplers.drafting import ngram"),
        (
            "mmaccel.pipelines.hosts.vision_language.x",
            "import mmaccel.pipelines.hosts.attach.patching",
        ),
        ("mmaccel.pipelines.models.x", "from mmaccel.pipelines.hosts.attach import patching"),
        (
            "mmaccel.pipelines.hosts.runner.x",
            "from mmaccel.pipelines.hosts.causal_lm.model import y",
        ),
        (
            "mmaccel.pipelines.hosts.attach.x",
            "from mmaccel.pipelines.image_to_text.pipeline import y",
        ),
        ("mmaccel.pipelines.media", "from mmaccel import attach"),
        (
            "mmaccel.pipelines.hosts.layers.x",
            "from mmaccel.pipelines.hosts.causal_lm.model import y",
        ),
        ("mmaccel.commands.x", "load('mmaccel.pipelines.hosts.causal_lm.model:CausalLMWindow')"),
        ("mmaccel.commands.x", "FOLDER = 'mmaccel.pipelines.models.'"),
    ],
)
def test_what_must_never_be_is_found(module: str, source: str) -> None:
    texts = {
        "mmaccel": "",
        "mmaccel.samplers.drafting.ngram": "class NGram(DraftSource): pass",
        "mmaccel.pipelines.hosts.attach.patching": "",
        "mmaccel.pipelines.hosts.causal_lm.model": "",
        "mmaccel.pipelines.image_to_text.pipeline": "",
        "mmaccel.pipelines.models.janus": "",
    }
    texts |= {module: source}
    assert len(broken(texts, graph(texts))) == 1
