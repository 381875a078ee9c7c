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
    assert make_table(sizes).endswith("| all | 8 | 0 |")


def test_the_loop_a_policy_and_a_model_are_read_from_top_to_bottom() -> None:
    """The reading path of docs/architecture.md: a class a file, of so many lines at most."""
    path = {
        "samplers/window/run.py": ("WindowRun", 250),
        "samplers/window/jacobi.py": ("Jacobi", 80),
        "pipelines/causal_lm/model.py": ("CausalLMWindow", 450),
    }
    for name, (cls, most) in path.items():
        lines = (Path(__file__).parents[2] / name).read_text(encoding="utf-8").splitlines()
        assert len(lines) <= most, name
        (line,) = [line for line in lines if line.startswith("class ")]
        assert line.startswith(f"class {cls}("), name
