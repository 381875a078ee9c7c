"""Files: described, and free of the machine they were written on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, modules

# absolute paths below a folder that differs from machine to machine
MACHINE_PATH = re.compile(r"(?<![\w.~/:\]\)}*])/(?:home|root|Users|work|tmp|opt|mnt|workspace)/\w")
FOUR = ("kernels", "samplers", "pipelines", "tokenizers_vq")


def own_files() -> list[Path]:
    """Text files that are, or are about to be, part of the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("this checkout has no git metadata, so its files cannot be told from others")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    files = [ROOT / name for name in listed if name]
    texts = {".py", ".md", ".sh", ".toml", ".json", ".yml", ".yaml", ".txt", ".cfg", ""}
    return [f for f in files if f.is_file() and f.suffix in texts and f != Path(__file__)]


@pytest.mark.parametrize("module", list(modules()))
def test_module_says_what_it_is(module: str) -> None:
    import ast

    source = modules()[module].read_text(encoding="utf-8")
    assert not source.strip() or ast.get_docstring(ast.parse(source))


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


def test_the_four_floors_hide_no_package() -> None:
    """A folder without `__init__.py` never hides an installed package of the same name."""
    assert [name for name in FOUR if (ROOT / name / "__init__.py").exists()] == []
    assert [name for name in FOUR if not (ROOT / name).is_dir()] == []


def test_shipped_weights_are_small() -> None:
    shelf = ROOT / "mmaccel" / "demo" / "weights"
    size = {d: sum(file.stat().st_size for file in d.iterdir()) for d in shelf.iterdir()}
    assert 0 < size.pop(shelf / "scenes") <= 16 * 2**20
    assert 0 < size.pop(shelf / "scenes-features") <= 0.5e6
    assert 0 < sum(size.values()) <= 12e6  # the masked models


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda f: f.name)
def test_shell_scripts_parse(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_continuous_integration_runs_the_test_script() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash") and "scripts/test.sh" in text
