"""Prompt files: three formats, ids and seeds, and files that never end.

What is refused, and how: tests/messages/test_commands.py.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmaccel import limits
from mmaccel.batch.prompts import Row, make_items, read_prompts, seed_of
from mmaccel.errors import OptionError
from mmaccel.limits import parse_json
from tests.architecture.source import ROOT

Read = Callable[[str, str], list[Row]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Write a file of a name and read it back as rows."""

    def run(name: str, text: str) -> list[Row]:
        file = tmp_path / name
        file.write_bytes(text.encode("utf-8"))
        return read_prompts(str(file))

    return run


def test_the_three_formats_say_the_same(read: Read) -> None:
    expected = Row("a", "a red circle, small", None, 7, 2, (64, 32), "jacobi", {"window": 8}, 1)
    line = {"id": "a", "prompt": expected.prompt, "seed": 7, "n": 2}
    line |= {"policy": "jacobi", "params": {"window": 8}}
    for size in ("64x32", [64, 32], " 64 X 32 "):
        assert read("p.jsonl", json.dumps(line | {"size": size})) == [expected]
    cells = 'a,"a red circle, small",7,2,64x32,jacobi,"{""window"": 8}"'
    (row,) = read("p.csv", f"id,prompt,seed,n,size,policy,params\r\n{cells}\r\n")
    assert row.line == 2 and row == Row(**{**vars(expected), "line": 2})
    (plain,) = read("p.txt", "\ufeffa red circle, small\n\n")
    assert plain.prompt == expected.prompt and plain.id.startswith("a-red-circle-")


def test_line_ends_of_all_systems_and_no_others_end_a_line(read: Read) -> None:
    (row,) = read("p.jsonl", '{"prompt": "one\u2028two\u0085three"}')
    assert row.prompt == "one\u2028two\u0085three"
    assert len(read("p.txt", "one\u2028two\r\nthree\n")) == 2
    assert [row.prompt for row in read("p.txt", "one\rtwo\r")] == ["one", "two"]
    assert len(read("p.csv", "prompt;n\ra, b;1\rc;1\r")) == 2
    (row,) = read("p.csv", 'id,prompt,n\nconsole.1,"two\nlines",\n\n')
    assert row.prompt == "two\nlines" and row.n == 1


def test_standard_input_is_json_lines_or_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for data, prompts in ((b'{"prompt": "x y"}\n', ["x y"]), (b"x y\nz\n", ["x y", "z"])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert [row.prompt for row in read_prompts("-")] == prompts


def test_a_made_id_depends_on_the_row_alone(read: Read) -> None:
    """It stays from version to version, so that --resume finds it, and gives way to a given one."""
    one, two = read("a.txt", "red\nblue\n" + "red\n" * 20_000), read("b.txt", "blue\nred\n")
    assert one[0].id == two[1].id == "red-4e3408e856fe" and one[1].id == two[0].id
    assert [row.id for row in one[2::10_000]] == [one[0].id + "-2", one[0].id + "-10002"]
    assert read("c.jsonl", '{"prompt": "red", "seed": 1}')[0].id != one[0].id
    made = one[0].id
    rows = read("b.jsonl", f'{{"prompt": "red"}}\n{{"prompt": "blue", "id": "{made}"}}')
    assert [row.id for row in rows] == [made + "-2", made]


def test_the_seed_of_an_item_is_a_hash_of_base_id_and_k() -> None:
    by_hand = int(hashlib.sha256(b'[5, "fox", 2]').hexdigest()[:16], 16)
    assert seed_of(5, "fox", 2) == by_hand
    fox, own = Row("fox", "x", n=3), Row("own", "x", n=2, seed=2**64 - 1)
    items = make_items([fox, own], 5)
    assert items[2].seed == by_hand and items[2].file == f"fox_2_{by_hand}.png"
    assert [item.seed for item in items[3:]] == [2**64 - 1, 0]
    assert [item.seed for item in make_items([own, fox], 5)[2:]] == [i.seed for i in items[:3]]


def test_tables_of_other_programs_are_read(read: Read) -> None:
    """Their separators, names of columns, sizes in two of them, and numbers with a point."""
    (same,) = read("q.jsonl", '{"prompt": "a, b", "negative": "c", "n": 2}')
    for name, text in (
        ("p.csv", 'Prompt,Negative_Prompt,NUM_IMAGES,params\n"a, b",c,2,{}\n'),
        ("p.csv", '"prompt";"negative prompt";"num_images_per_prompt"\n"a, b";"c";"2.0"\n'),
        ("p.csv", "\ufeffprompt\tnegative\tcount\tseed\r\na, b\tc\t2\t-1.0\r\n"),
        ("p.tsv", "prompt\tnegative\tn\na, b\tc\t2\n"),
        ("p.jsonl", '{"prompt": "a, b", "negative_prompt": "c", "num_images_per_prompt": 2}'),
    ):
        (row,) = read(name, text)
        assert (row.prompt, row.negative, row.n, row.params) == ("a, b", "c", 2, {})
        assert row.id == same.id and row.seed is None
    (row,) = read("p.csv", 'prompt;width;height;Guidance_Scale;params\nx;64.0;32;2.5;{"window": 8}')
    assert (row.size, row.params) == ((64, 32), {"window": 8, "guidance_scale": 2.5})
    assert read("p.csv", "prompt,guidance\nx,\n")[0].params == {}


def test_texts_and_json_have_limits(read: Read, monkeypatch: Any) -> None:
    assert parse_json('{"a": "' + "[" * 999 + '"}') == {"a": "[" * 999}
    for text in ("[" * 65 + "]" * 65, '{"a":' * 70 + "1" + "}" * 70, "9" * 41):
        with pytest.raises(ValueError, match="more than (64|40)"):
            parse_json(text)
    monkeypatch.setattr(limits, "MAX_FILE", 20)
    with pytest.raises(OptionError, match="at most 20 bytes"):
        read("p.txt", "x" * 21)


ENDLESS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
from mmaccel import limits
from mmaccel.cli import main
limits.MAX_FILE = 2**24
sys.exit(main(["generate", "--prompts", "-", "--dry-run"]))
"""


@pytest.mark.slow
def test_an_endless_input_is_refused() -> None:
    """In a process of its own, with 2 GB: it was read until memory ended, or for ever."""
    program = "import sys\nwhile True: sys.stdout.buffer.write(bytes(2**20))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as source:  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", ENDLESS], cwd=ROOT, stdin=source.stdout, capture_output=True,
            text=True, timeout=60,
        )  # fmt: skip
        source.kill()
    assert done.returncode == 2 and "at most 16777216 bytes" in done.stderr
