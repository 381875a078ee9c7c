"""The size of the repository, as a machine reads it."""

from __future__ import annotations

from pathlib import Path

from scripts.size import find_excesses, make_table, measure, measure_folders


def test_squeezed_lines_and_comments_gain_and_cost_nothing() -> None:
    plain = "def f(x):\n    y = x + 1\n    return y\n"
    assert measure(plain) == {"tokens": 13, "docstrings": 0}
    assert measure("# why\ndef f(\n    x\n):\n\n    y = x + 1; return y  # so\n")["tokens"] == 14
    documented = (
        '"""A module."""\nclass A:\n    """Two\n    lines."""\n\n    x = 1\n    """Of it."""\n'
    )
    assert measure(documented) == {"tokens": 6, "docstrings": 4}
    assert measure('x = """no\ndocstring"""\n') == {"tokens": 3, "docstrings": 0}


def test_a_folder_above_its_number_is_named(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one.py").write_text("x = 1\n")
    (tmp_path / "a" / "b" / "two.py").write_text("x = 1 + 1\n")
    sizes = measure_folders(tmp_path, ["a", "a/b"])
    assert sizes == {"a": {"tokens": 3, "docstrings": 0}, "a/b": {"tokens": 5, "docstrings": 0}}
    budget = {"a": {"tokens": 3, "docstrings": 0}, "a/b": {"tokens": 4, "docstrings": 0}}
    (excess,) = find_excesses(sizes, budget)
    assert excess.startswith("a/b: expected at most 4 tokens, received 5; delete")
    assert measure('x = f"{a:.{b}} {c}"\n')["tokens"] == 3  # of one kind, whichever Python counts
    assert make_table(sizes).endswith("| all | 8 | 0 |")


def test_the_reading_path_is_short_enough_to_be_read() -> None:
    """The path of docs/architecture.md: one class, or one function, a file."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    path = {
        "samplers/window/run.py": ("class WindowRun(", 250),
        "samplers/window/jacobi.py": ("class Jacobi(", 80),
        "pipelines/hosts/causal_lm/model.py": ("class CausalLMWindow(", 450),
        "pipelines/hosts/attach/attaching.py": ("def attach_policy(", 120),
    }
    for name, (begins, most) in path.items():
        lines = (root / name).read_text(encoding="utf-8").splitlines()
        assert len(lines) <= most, name
        assert sum(line.startswith(begins) for line in lines) == 1, name
        assert sum(line.startswith("class ") for line in lines) <= 1, name
        assert f"`{name}`" in page, name
