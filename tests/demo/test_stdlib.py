"""Modules and prompts of `stdlib`."""

from __future__ import annotations

from pathlib import Path

from mmaccel.demo.loading import load_demo
from mmaccel.demo.stdlib.modules import Module, read_modules
from mmaccel.demo.stdlib.prompts import held_out_modules, make_prompts


def test_modules_are_source_and_nothing_that_was_left_out(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "test/d.py", "a/tests/e.py", "a/data.txt", "config-3.11/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n", encoding="utf-8")
    (tmp_path / "long.py").write_text("#" * 400_001, encoding="utf-8")
    found = read_modules(tmp_path)
    assert found == [Module("a/c.py", "# a/c.py\n"), Module("b.py", "# b.py\n")]


def test_a_twentieth_is_held_out_by_path_alone() -> None:
    modules = read_modules()
    held_out = [module.name for module in modules if module.is_held_out]
    assert 0.02 < len(held_out) / len(modules) < 0.1
    known = {"_sitebuiltins.py", "asyncio/events.py"}  # the same ones on every machine
    assert known <= set(held_out) and not {"heapq.py", "json/decoder.py"} & set(held_out)
    assert [Module(name, "").is_held_out for name in known] == [True, True]


def test_prompts_are_pieces_of_held_out_modules() -> None:
    _, tokenizer = load_demo("stdlib")
    prompts = make_prompts(tokenizer, 6, 48)
    assert prompts == make_prompts(tokenizer, 6, 48) != make_prompts(tokenizer, 6, 48, seed=1)
    texts = [module.text for module in held_out_modules()]
    for ids in prompts:
        assert len(ids) == 48 and ids[0] == tokenizer.bos_token_id
        piece = tokenizer.decode(ids, skip_special_tokens=True)
        assert any(piece in text for text in texts)
