"""The wheel: all packages, one top-level name, the weights; it works where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, TOP_FOLDERS, modules

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """The output of a program, which must succeed."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **environment}, text=True,
        capture_output=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of this checkout, because a build writes into the folder it builds."""
    folder = tmp_path_factory.mktemp("build")
    copy = folder / "copy"
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("mmaccel", *TOP_FOLDERS):
        shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run(sys.executable, "-m", "pip", "wheel", copy, "-w", folder, *options, cwd=folder)
    (file,) = folder.glob("*.whl")
    return file


def test_wheel_claims_one_name_and_holds_everything(wheel: Path) -> None:
    assert wheel.stat().st_size <= 60 * 2**20
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    info = f"mmaccel-{wheel.name.split('-')[1]}.dist-info"
    assert tops == {"mmaccel", info}
    expected = {
        module.replace(".", "/") + ("/__init__.py" if file.stem == "__init__" else ".py")
        for module, file in modules().items()
    }
    assert expected - names == set()
    weights, pack = ROOT / "mmaccel" / "demo" / "weights", ROOT / "mmaccel" / "comfy" / "pack"
    data = [pack / "pyproject.toml", *(pack / "example_workflows").rglob("*.json")]
    data += [file for file in weights.rglob("*") if file.is_file()]
    assert {file.relative_to(ROOT).as_posix() for file in data} - names == set()
    assert "mmaccel/py.typed" in names and f"{info}/licenses/LICENSE" in names


def test_installed_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        "import mmaccel, mmaccel.kernels.noise as n, mmaccel.samplers.window.jacobi as j;"
        "from mmaccel.pipelines.text_to_image.registry import find_source;"
        "print(mmaccel.__file__, n.__file__, j.__file__, find_source('scenes'), sep='\\n')"
    )
    out = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    paths = out.split()
    assert len(paths) == 4
    assert all(path.startswith(str(tmp_path / "site" / "mmaccel")) for path in paths)


def test_installed_console_script_answers() -> None:
    try:
        scripts = distribution("mmaccel").entry_points
    except PackageNotFoundError:
        pytest.skip("mmaccel is not installed here; scripts/test.sh installs it")
    assert [(s.name, s.value) for s in scripts] == [("mmaccel", "mmaccel.cli:main")]
    program = Path(sys.executable).parent / "mmaccel"
    assert "generate" in run(program, "--help", cwd=Path.home())
