"""Prompt files: three formats, ids and seeds, and files that never end.

What is refused, and how: tests/messages/batch.py.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mmaccel import limits
from mmaccel.batch.prompts import Row, make_items, read_prompts, seed_of, take_shard
from mmaccel.errors import OptionError
from tests.architecture.source import ROOT
from tests.fuzz.hostile import make_zero

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
    line = {"id": "a", "prompt": expected.prompt, "seed": 7, "n": 2, "size": "64x32"}
    line |= {"policy": "jacobi", "params": {"window": 8}}
    assert read("p.jsonl", json.dumps(line)) == [expected]
    cells = 'a,"a red circle, small",7,2,64x32,jacobi,"{""window"": 8}"'
    (row,) = read("p.csv", f"id,prompt,seed,n,size,policy,params\r\n{cells}\r\n")
    assert row.line == 2 and row == Row(**{**vars(expected), "line": 2})
    (plain,) = read("p.txt", "\ufeffa red circle, small\n\n")
    assert plain.prompt == expected.prompt and plain.id.startswith("a-red-circle-")


@pytest.mark.parametrize("size", ['"64x32"', "[64, 32]", '" 64 X 32 "'])
def test_sizes(read: Read, size: str) -> None:
    assert read("p.jsonl", f'{{"prompt": "x", "size": {size}}}')[0].size == (64, 32)
    assert read("p.jsonl", '{"prompt": "x", "size": 64}')[0].size == (64, 64)


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
    one, two = read("a.txt", "red\nblue\nred\n"), read("b.txt", "blue\nred\n")
    assert one[0].id == two[1].id == "red-4e3408e856fe" and one[1].id == two[0].id
    assert one[2].id == one[0].id + "-2"
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


def test_shards_are_all_items_each_once() -> None:
    items = make_items([Row("a", "x", n=7), Row("b", "x", n=4)], 0)
    for n in (1, 2, 3, 11, 12):
        parts = [take_shard(items, i, n) for i in range(1, n + 1)]
        assert sorted(i.key for p in parts for i in p) == sorted(i.key for i in items)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


SPELLED = (
    ("p.csv", "prompt;negative;n;params\na, b;c;2;{}\n"),
    ("p.csv", 'Prompt,Negative_Prompt,NUM_IMAGES,params\n"a, b",c,2,{}\n'),
    ("p.csv", '"prompt";"negative prompt";"num_images_per_prompt"\n"a, b";"c";"2"\n'),
    ("p.csv", "\ufeffprompt\tnegative\tcount\r\na, b\tc\t2\r\n"),
    ("p.tsv", "prompt\tnegative\tn\na, b\tc\t2\n"),
    ("p.jsonl", '{"prompt": "a, b", "negative_prompt": "c", "num_images_per_prompt": 2}'),
)


@pytest.mark.parametrize(("name", "text"), SPELLED, ids=range(len(SPELLED)))
def test_separators_and_names_of_other_programs(read: Read, name: str, text: str) -> None:
    (row,) = read(name, text)
    assert (row.prompt, row.negative, row.n, row.params) == ("a, b", "c", 2, {})
    assert row.id == read("q.jsonl", '{"prompt": "a, b", "negative": "c", "n": 2}')[0].id


def test_sampling_parameters_are_columns_too(read: Read) -> None:
    (row,) = read("p.csv", 'prompt;Guidance_Scale;top_k;params\nx;2.5;7;{"window": 8}\ny;;;\n')[:1]
    assert row.params == {"window": 8, "guidance_scale": 2.5, "top_k": 7}
    assert read("p.csv", "prompt,guidance\nx,\n")[0].params == {}
    same = read("p.jsonl", '{"prompt": "x", "params": {"temperature": 0.5}}')
    assert read("q.jsonl", '{"prompt": "x", "temperature": 0.5}') == same


def test_tables_of_other_programs_are_read(read: Read) -> None:
    (row,) = read("p.csv", "prompt,width,height,n,seed\nx,64.0,32,2.0,-1.0\n")
    assert (row.size, row.n, row.seed) == ((64, 32), 2, None)
    assert row.id == read("q.jsonl", '{"prompt": "x", "size": "64x32", "n": 2}')[0].id


def test_equal_prompts_are_numbered_in_linear_time(read: Read) -> None:
    began = time.process_time()
    rows = read("p.txt", "a red circle\n" * 20_000)
    assert time.process_time() - began < 5  # 26 s when each of them counted from 2 again
    first = rows[0].id
    assert [row.id for row in rows[::9999]] == [first, f"{first}-10000", f"{first}-19999"]


def test_a_text_has_limits(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LINES", 3)
    monkeypatch.setattr(limits, "MAX_FILE", 20)
    assert len(read("p.txt", "a\nb\nc\n")) == 3
    for text, most in (("a\nb\nc\nd\n", "3 lines"), ("x" * 21, "20 bytes")):
        with pytest.raises(OptionError, match=f"at most {most}"):
            read("p.txt", text)


ENDLESS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
from mmaccel.batch.prompts import read_prompts
from mmaccel.errors import OptionError
try:
    read_prompts(sys.argv[1])
except OptionError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("fifo", "expected a regular file, received .* a FIFO"),
        ("zero", "expected a regular file, received .* a (device|FIFO)"),
        ("bytes(2**20)", "lines of at most 1048576 bytes, received more in line 1"),
        (r"b'x\n' * 2**20", "at most 4000000 lines, received more"),
    ],
)
def test_an_endless_file_is_refused(tmp_path: Path, kind: str, message: str) -> None:
    """In a process of its own, with 2 GB: the file was read until memory ended, or for ever."""
    file = tmp_path / "p.jsonl"
    program = f"import sys\nwhile True: sys.stdout.buffer.write({kind})"
    source, name = ["true"], str(file)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "zero":
        make_zero(file)
    else:
        source, name = [sys.executable, "-c", program], "-"
    with subprocess.Popen(source, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as stdin:
        try:
            done = subprocess.run(
                [sys.executable, "-c", ENDLESS, name],
                cwd=ROOT,
                stdin=stdin.stdout,
                capture_output=True,
                text=True,
                timeout=20,
            )
        finally:
            stdin.kill()
    assert done.returncode == 0 and re.search(message, done.stdout), done.stderr
