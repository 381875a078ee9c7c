"""Prompt files: three formats, ids and seeds, and every row that is wrong, by its line."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmaccel import limits
from mmaccel.batch.prompts import Row, make_items, read_prompts, seed_of, take_shard
from mmaccel.errors import OptionError
from tests.architecture.source import ROOT
from tests.fuzz.hostile import make_zero


@pytest.fixture
def read(tmp_path: Path):
    """Write a file of a name and read it back as rows."""

    def run(name: str, data: str | bytes) -> list[Row]:
        file = tmp_path / name
        file.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
        return read_prompts(str(file))

    return run


def test_the_three_formats_say_the_same(read) -> None:
    line = {"id": "a", "prompt": "a red circle, small", "seed": 7, "n": 2, "size": "64x32",
            "policy": "jacobi", "params": {"window": 8}}  # fmt: skip
    cells = 'a,"a red circle, small",7,2,64x32,jacobi,"{""window"": 8}"'
    expected = Row("a", "a red circle, small", None, 7, 2, (64, 32), "jacobi", {"window": 8}, 1)
    assert read("p.jsonl", json.dumps(line)) == [expected]
    (row,) = read("p.csv", f"id,prompt,seed,n,size,policy,params\r\n{cells}\r\n")
    assert (row.line, row.params) == (2, {"window": 8})
    assert (row.id, row.prompt, row.seed, row.n, row.size) == ("a", expected.prompt, 7, 2, (64, 32))
    (plain,) = read("p.txt", "\ufeffa red circle, small\n\n")
    assert plain.prompt == expected.prompt and plain.id.startswith("a-red-circle-")


def test_only_a_line_feed_ends_a_line(read) -> None:
    (row,) = read("p.jsonl", '{"prompt": "one\u2028two\u0085three"}')
    assert row.prompt == "one\u2028two\u0085three"
    assert len(read("p.txt", "one\u2028two\r\nthree\n")) == 2


def test_standard_input_is_json_lines_or_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for data, prompts in ((b'{"prompt": "x y"}\n', ["x y"]), (b"x y\nz\n", ["x y", "z"])):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert [row.prompt for row in read_prompts("-")] == prompts


def test_a_made_id_depends_on_the_row_alone(read) -> None:
    one = read("a.txt", "red\nblue\nred\n")
    two = read("b.txt", "blue\nred\n")
    assert one[0].id == two[1].id and one[1].id == two[0].id
    assert one[2].id == one[0].id + "-2"
    with_seed = read("c.jsonl", '{"prompt": "red", "seed": 1}')
    assert with_seed[0].id != one[0].id


def test_a_made_id_gives_way_to_a_given_one(read) -> None:
    made = read("a.txt", "red\n")[0].id
    rows = read("b.jsonl", f'{{"prompt": "red"}}\n{{"prompt": "blue", "id": "{made}"}}')
    assert [row.id for row in rows] == [made + "-2", made]


def test_the_seed_of_an_item_is_a_hash_of_base_id_and_k() -> None:
    text = '[5, "fox", 2]'
    by_hand = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
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


BAD = [
    ('{"prompt": ""}', "line 1: prompt: expected text, received none"),
    ('{"prompt": "x", "seeds": 1}', "line 1: 'seeds': expected fields out of id, prompt"),
    ('\n{"prompt": "x", "n": 0}', "line 2: n: expected an integer in 1..100000, received 0"),
    ('{"prompt": "x", "n": true}', "n: expected an integer"),
    ('{"prompt": "x", "seed": 18446744073709551616}', "seed: expected an integer in"),
    ('{"prompt": "x", "size": "0x4"}', "size: expected pixels"),
    ('{"prompt": "x", "policy": "jacoby"}', "policy: expected one of autoregressive"),
    ('{"prompt": "x", "params": 3}', "params: expected names and values"),
    ('{"prompt": "x", "id": "../../etc/x"}', "id: expected 1 to 100 letters"),
    ('{"prompt": "x", "id": ".hidden"}', "id: expected 1 to 100 letters"),
    ('{"prompt": "x", "id": "a/b"}', "id: expected 1 to 100 letters"),
    ('{"prompt": "x", "id": ""}', "id: expected 1 to 100 letters"),
    ('{"prompt": "x", "id": "Con.7"}', "id: expected no Windows device name"),
    ("\n".join(['{"prompt": "x", "n": 100000}'] * 21), "at most 2000000 images, received 21"),
    ('{"prompt": 5}', "prompt: expected text, received 5"),
    ('{"prompt": "a\\u0000b"}', "prompt: expected text"),
    ('{"prompt": "\\ud800"}', "prompt: expected text"),
    ('["x"]', "line 1: expected an object in braces"),
    ('{"prompt": "x"', "line 1: expected JSON"),
    ('{"prompt": "x"', 'write one object a line, such as {"prompt": "a red circle"}'),
    ('{"prompt": "x", "prompt": "y"}', "a name occurs twice"),
    ('{"prompt": "x", "id": "a"}\n{"prompt": "y", "id": "A"}', "line 2: expected an id of its own"),
    ("[" * 100_000, "line 1: expected JSON"),
    (json.dumps({"prompt": "x" * 900_000}), "at most 20000 characters, received 900000"),
    (json.dumps({"prompt": "x" * 10_000_000}), "lines of at most 1048576 bytes, received 10000014"),
    ('{"prompt": "x", "params": ' + "[" * 65 + "]" * 65 + "}", "more than 64 brackets within"),
    ('{"prompt": "x", "seed": ' + "9" * 41 + "}", "an integer of more than 40 digits"),
    (
        '{"prompt": "x", "size": "16385x8"}',
        "size: expected pixels such as 768 or '1024x768', up to",
    ),
    ("", "expected at least one prompt, received none"),
    ("\n \n", "expected at least one prompt, received none"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_what_is_wrong_is_named_with_its_line(read, text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        read("p.jsonl", text)
    assert message in str(caught.value) and len(str(caught.value)) < 1000


def test_all_wrong_rows_are_named_at_once(read) -> None:
    with pytest.raises(OptionError) as caught:
        read("p.jsonl", "\n".join(['{"prompt": "x"}', '{"n": 1}', '{"prompt": "x"}', "no"]))
    assert "received 2 that cannot" in str(caught.value)
    assert "line 2:" in str(caught.value) and "line 4:" in str(caught.value)
    with pytest.raises(OptionError, match=r"\(and 5 more\)"):
        read("p.jsonl", "no\n" * 25)


def test_a_table_that_is_none(read) -> None:
    for text, message in (
        ("prompt,seeds\nx,1\n", "line 2: 'seeds': expected fields"),
        ("text\nx\n", "line 1: expected a heading"),
        ("prompt,prompt\nx,y\n", "line 1: expected a heading"),
        ("prompt,n\nx,1,2\n", "line 2: expected 2 cells, received 3"),
        ("prompt,n\nx,1\ny\n", "line 3: expected 2 cells, received 1; .* an empty one takes"),
        ('prompt,params\nx,"{""a"": 1, ""a"": 2}"\n', "line 2: params: expected names"),
        ('prompt\n"x\n', "expected CSV"),
        (f"prompt,params\nx,{'[' * 100_000}\n", "line 2: params: expected names and values"),
        ("", "expected at least one prompt"),
    ):
        with pytest.raises(OptionError, match=message):
            read("p.csv", text)
    (row,) = read("q.csv", 'id,prompt,n\nconsole.1,"two\nlines",\n\n')
    assert row.prompt == "two\nlines" and row.n == 1


SPELLED = [
    ("p.csv", "prompt;negative;n;params\na, b;c;2;{}\n"),
    ("p.csv", 'Prompt,Negative_Prompt,NUM_IMAGES,params\n"a, b",c,2,{}\n'),
    ("p.csv", '"prompt";"negative prompt";"num_images_per_prompt"\n"a, b";"c";"2"\n'),
    ("p.csv", "\ufeffprompt\tnegative\tcount\r\na, b\tc\t2\r\n"),
    ("p.tsv", "prompt\tnegative\tn\na, b\tc\t2\n"),
    ("p.jsonl", '{"prompt": "a, b", "negative_prompt": "c", "num_images_per_prompt": 2}'),
]


@pytest.mark.parametrize(("name", "text"), SPELLED, ids=range(len(SPELLED)))
def test_separators_and_names_of_other_programs(read, name: str, text: str) -> None:
    (row,) = read(name, text)
    assert (row.prompt, row.negative, row.n, row.params) == ("a, b", "c", 2, {})
    assert row.id == read("q.jsonl", '{"prompt": "a, b", "negative": "c", "n": 2}')[0].id


def test_sampling_parameters_are_columns_too(read) -> None:
    (row,) = read("p.csv", 'prompt;Guidance_Scale;top_k;params\nx;2.5;7;{"window": 8}\ny;;;\n')[:1]
    assert row.params == {"window": 8, "guidance_scale": 2.5, "top_k": 7}
    assert read("p.csv", "prompt,guidance\nx,\n")[0].params == {}
    same = read("p.jsonl", '{"prompt": "x", "params": {"temperature": 0.5}}')
    assert read("q.jsonl", '{"prompt": "x", "temperature": 0.5}') == same
    for text, message in (
        ('{"prompt": "x", "temperature": 1, "params": {"temperature": 1}}', "in params too"),
        ('{"prompt": "x", "n": 1, "num_images": 2}', "'num_images': expected n once"),
        (
            '{"prompt": "x", "guidance_scale": "high"}',
            "guidance_scale: expected a number, received",
        ),
        ('{"prompt": "x", "top_k": true}', "top_k: expected a number"),
        ('{"prompt": "x", "guidance_scale": 2, "params": 3}', "params: expected names and values"),
        ('{"prompt": "x", "steps": 3}', "'steps': expected fields out of id, .*min_p; leave"),
    ):
        with pytest.raises(OptionError, match=message):
            read("p.jsonl", text)
    with pytest.raises(OptionError, match="received 3; quote text that holds ';'"):
        read("p.csv", "prompt;n\nx;1;2\n")


def test_files_that_cannot_be_read(read, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected UTF-8, received the byte 0xff in line 2"):
        read("p.txt", b"fine\n\xff\xfe\n")
    with pytest.raises(OptionError, match="No such file"):
        read_prompts(str(tmp_path / "none.txt"))
    with pytest.raises(OptionError, match="a file named .jsonl, .csv or .txt"):
        read("p.doc", "x")


def test_equal_prompts_are_numbered_in_linear_time(read) -> None:
    began = time.process_time()
    rows = read("p.txt", "a red circle\n" * 20_000)
    assert time.process_time() - began < 5  # 26 s when each of them counted from 2 again
    assert [row.id for row in rows[::9999]] == [
        rows[0].id,
        f"{rows[0].id}-10000",
        f"{rows[0].id}-19999",
    ]


def test_a_text_has_limits(read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LINES", 3)
    monkeypatch.setattr(limits, "MAX_FILE", 20)
    assert len(read("p.txt", "a\nb\nc\n")) == 3
    with pytest.raises(OptionError, match="at most 3 lines"):
        read("p.txt", "a\nb\nc\nd\n")
    with pytest.raises(OptionError, match="at most 20 bytes"):
        read("p.txt", "x" * 21)


ENDLESS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
from mmaccel.batch.prompts import read_prompts
from mmaccel.errors import OptionError
from tests.architecture.source import ROOT
from tests.fuzz.hostile import make_zero
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
        ("zeros on stdin", "lines of at most 1048576 bytes, received more in line 1"),
        ("lines on stdin", "at most 4000000 lines, received more"),
    ],
)
def test_an_endless_file_is_refused(tmp_path: Path, kind: str, message: str) -> None:
    """In a process of its own, with 2 GB: the file was read until memory ended, or for ever."""
    file, stdin = tmp_path / "p.jsonl", None
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "zero":
        make_zero(file)
    else:
        repeated = "b'x\\n' * 2**20" if kind.startswith("lines") else "bytes(2**20)"
        program = f"import sys\nwhile True: sys.stdout.buffer.write({repeated})"
        stdin = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    try:
        done = subprocess.run(
            [sys.executable, "-c", ENDLESS, str(file) if stdin is None else "-"], cwd=ROOT,
            stdin=stdin and stdin.stdout, capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    finally:
        if stdin is not None:
            stdin.kill()
            stdin.communicate()
    assert done.returncode == 0 and re.search(message, done.stdout), done.stderr


def test_what_steers_a_terminal_is_not_repeated(read) -> None:
    with pytest.raises(OptionError) as caught:
        read("p.jsonl", '{"prompt": "x", "id": "\\u001b[2J\\u202e"}')
    assert "\x1b" not in str(caught.value) and "\u202e" not in str(caught.value)
