"""Files: described, in folders of a readable size, without paths of one machine."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, TOP_FOLDERS, modules, parse

# absolute paths below a folder that differs from machine to machine
MACHINE_PATH = re.compile(r"(?<![\w.~/:\]\)}*])/(?:home|root|Users|work|tmp|opt|mnt|workspace)/\w")
MOST_FILES = (
    28  # modules in one folder, a method a file; a kernel and its Triton version count as one
)
MOST_MEGABYTES = {  # of weights that ship
    "scenes": 16.8, "scenes-features": 0.5, "moving-scenes-features": 0.7, "voices-features": 0.3,
    "moving-scenes": 8, "voices": 11.5, "scenes-vqa": 10, "recall": 2,
    "voices-masked": 4,
}  # fmt: skip


def own_files() -> list[Path]:
    """Text files that are, or are about to be, part of the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("this checkout has no git metadata that lists its own files")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    files = [ROOT / name for name in listed if name]
    texts = {".py", ".md", ".sh", ".toml", ".json", ".yml", ".yaml", ".txt", ".cfg", ""}
    return [f for f in files if f.is_file() and f.suffix in texts and f != Path(__file__)]


def test_every_module_has_a_docstring() -> None:
    sources = {name: file.read_text(encoding="utf-8") for name, file in modules().items()}
    undescribed = [
        name
        for name, source in sources.items()
        if source.strip() and not ast.get_docstring(parse(source))
    ]
    assert undescribed == []


def test_no_folder_is_crowded() -> None:
    sizes = Counter(
        file.parent.relative_to(ROOT).as_posix()
        for file in modules().values()
        if file.name != "__init__.py" and not file.stem.endswith(("_triton", "_numpy"))
    )
    assert {folder: n for folder, n in sizes.items() if n > MOST_FILES} == {}


def test_no_file_names_a_machine_path() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for file in own_files()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_machine_paths_are_recognised() -> None:
    assert MACHINE_PATH.search("--work /work" + "/pools") and MACHINE_PATH.search("'/home" + "/me'")
    assert not MACHINE_PATH.search("https://host/work/x and a/tmp/b and #!/usr/bin/env bash")


def test_the_folders_at_the_top_hide_no_package() -> None:
    """A folder without `__init__.py` never hides an installed package of the same name."""
    assert [name for name in TOP_FOLDERS if not (ROOT / name).is_dir()] == []
    assert [name for name in TOP_FOLDERS if (ROOT / name / "__init__.py").exists()] == []


def test_shipped_weights_are_small() -> None:
    folders = (ROOT / "mmaccel" / "demo" / "weights").iterdir()
    sizes = {d.name: sum(f.stat().st_size for f in d.rglob("*") if f.is_file()) for d in folders}
    for name, most in MOST_MEGABYTES.items():
        assert 0 < sizes.pop(name) <= most * 1e6, name
    assert 0 < sum(sizes.values()) <= 12e6  # the masked models


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda f: f.name)
def test_shell_scripts_parse(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_continuous_integration_runs_the_test_script() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash") and "bash scripts/test.sh --all" in text
