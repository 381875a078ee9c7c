"""Values and bytes that no command expects."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKER = "code-ran"  # a file that only code of an input would make

INTEGERS = (
    "-1", "0", "1000000000", "99999999999999999999", "-9223372036854775809", "9" * 400,
    "9" * 4000, "9" * 5000, "1e9", "0x10", "1_0", "\u0663", "\u00b2", "", " ", "nan", "1.5", "--",
    "+3", "\x1b[31m1", "true", "None",
)  # fmt: skip
NUMBERS = (
    "nan", "inf", "-inf", "1e308", "-1e308", "1e-320", "-0.0", "1e400", "9" * 400, "9" * 5000,
    "0x1p3", "", "-1", "1,5", "\x1b[2J", "1e", "1__0",
)  # fmt: skip
TEXTS = (
    "", " ", "\n", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b31m", "\x1bc", "[red]x[/nope]",
    "[/]", "[link=http://x]y", ":smile:", "\u202eabc\u202c", "a\nb", "\u2028", "\U0001d54f" * 50,
    "\u00e9" * 300, "x" * 300, "x" * 5000, "..", "../../x", "-", "zero.jsonl", "fifo.jsonl",
    "loop.txt", "folder.txt", "socket.csv", "zero.png", "fifo.png", "empty.jsonl", ".", "./",
    "none/x", "--help", "%s%n%d", "{0}{name}", "${HOME}", f"$(touch {MARKER})",
    f"`touch {MARKER}`", f"; touch {MARKER}", "a\udcffb", "CON", "nul.txt", "hpu", "cuda",
    "cuda:99999999999", "meta", "mps", "xla:0", "vulkan", "privateuseone", "cpu:7", "all",
    "canvas", "scenes", "x" * 70 + "/y", "owner/name", "a/b/c", "~", "~root", "a" * 256,
    "os:system", "builtins:exit", "math:pi", ":", "os:", ":x", "..:x", "json.tool:main",
    "this_is:no_module", "1/0", "0/1", "5/4", "1/9" + "9" * 40, "9" * 5000,
    "9" * 5000 + "x" + "9" * 5000, "99999x99999", "1x", "0", "-5x7",
)  # fmt: skip
PLAUSIBLE = (  # what people write by mistake
    "no", "off", "yes", "True", "none", "auto", "0", "1", "2", "99", "-1", "1.0", "0.5", "50%",
    "0,5", "1e-300", "1e-9", "1e9", "9223372036854775808", "100000000", "[1, 2]", "(0.1, nan)",
    "{}", "cuda", "float16", "all", "16x16", "1/2", "nan", "inf", "-0.1", "1.5", "3.0", "+4",
)  # fmt: skip
LITERALS = (
    "", "{[]:1}", "{}", "[]", "[[]]", "()", "(1,)", "{1}", "{(): []}", "[" * 2000,
    "(" * 300 + ")" * 300, "[" * 17 + "]" * 17, "{" * 90 + "}" * 90, "-" * 5000 + "1",
    "-" * 90 + "1", "9" * 4200, "9" * 5000, "0x" + "f" * 4000, "(1, 0x" + "f" * 500 + ")",
    "1e999", "-1e999", "nan", "1j", "b'x'", "...", "True", "None", "'\\x1b[31m'", "\x1b[31m",
    f"__import__('os').system('touch {MARKER}')", "lambda: 1", "f'{1}'", "1 if 1 else 2",
    "x" * 20_000, "'" * 9000, "1" + "+1" * 3000, "1" + "if 1 else 1" * 50, "'a'" * 2000, "*",
    "\\", "#", "[1, 2", "0o7", "1__0", "1_0", "1e-320", "-1", "0", "1e308", "4097", "2.5",
    "[red]x[/nope]", "{1: {2: {3: {}}}}", "\u0663", "a\udcffb",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 1.5, -0.0, 2**31, 2**63, 2**64, 10**39, 10**41, 10**400, 1e308,
    1e-320, float("inf"), float("nan"), "", " ", "\x1b[31m", "\x00", "\ud800", "x" * 30_000, [],
    [[]], [1, 2], {}, {"a": {}}, {"": None}, "jacobi", "gsd", "stepwise", "8", "nan",
    [None] * 1000, "../../etc/x", "CON.1", "64x64", "1x1", [64, 64], "99999x99999", "\u202e",
    "[red]x[/nope]",
)  # fmt: skip


def deep(depth: int, *, is_object: bool = False) -> str:
    """JSON of so many brackets within brackets."""
    if is_object:
        return '{"a":' * depth + "1" + "}" * depth
    return "[" * depth + "]" * depth


JSON_TEXTS = (
    deep(63), deep(65), deep(900), deep(5000), deep(100_000), "[" * 200_000,
    deep(990, is_object=True), deep(50_000, is_object=True), "9" * 41, "9" * 4000, "9" * 6000,
    "-" + "9" * 500, "NaN", "Infinity", "1e999", "null", "true", '""', "3", "[]", "{}",
    '{"a": 1, "a": 2}', '"\\ud800"', '"\\u0000"', "'x'", "{", "]", "\x00", "\ufeff{}",
    '{"prompt": ' + deep(200) + "}", '"' + "x" * 2_000_000 + '"',
)  # fmt: skip


def some_bytes(rng: random.Random) -> bytes:
    """The content of a file that is none of the formats read here, or nearly one."""
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: b"",
        lambda: rng.randbytes(rng.randrange(1, 400)),
        lambda: bytes(rng.randrange(1, 300_000)),
        lambda: b"\xff\xfe" + "a red circle\n".encode("utf-16-le") * 3,
        lambda: b"\xef\xbb\xbf\n\n",
        lambda: b"\n" * rng.randrange(1, 200_000),
        lambda: b"x" * (2**20 + rng.randrange(3)),
        lambda: rng.choice(JSON_TEXTS).encode("utf-8", "surrogatepass"),
        lambda: (rng.choice(TEXTS) + "\n").encode("utf-8", "surrogateescape"),
        lambda: b'"' + b"a,\n" * 5000,
        lambda: b"\r" * 5000,
        lambda: "\u0301\u0316".encode() * rng.randrange(1, 60_000),
        lambda: b"\x80\x04\x95" + rng.randbytes(60),  # a pickle's beginning
    )
    return rng.choice(kinds)()


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Bytes of a valid file with some of them changed, lost, repeated or inserted."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        at = rng.randrange(len(found) + 1)
        until = min(len(found), at + rng.choice((1, 1, 2, 8, 100)))
        kind = rng.randrange(5)
        if kind == 0:
            del found[at:until]
        elif kind == 1:
            found[at:until] = rng.randbytes(until - at)
        elif kind == 2:
            found[at:at] = found[at:until] * rng.choice((1, 3, 50))
        elif kind == 3:
            found[at:at] = rng.choice(JSON_TEXTS[:7] + TEXTS).encode("utf-8", "surrogatepass")
        else:
            found[at:] = b""
    return bytes(found)


def mutate_object(value: dict[str, Any], rng: random.Random) -> str:
    """JSON of an object with some fields changed, lost, renamed or added."""
    found = dict(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice([*found, "extra"])
        kind = rng.randrange(4)
        if kind == 0:
            found.pop(name, None)
        elif kind == 1:
            found[rng.choice(("", "prompt", "\x1b[2J", "__class__", "self", "id"))] = found.pop(
                name, 1
            )
        else:
            found[name] = rng.choice(VALUES)
    text = json.dumps(found)
    if rng.random() < 0.2:  # a value that no encoder writes
        name = json.dumps(rng.choice(list(value)))
        text = text[:-1] + f", {name}: {rng.choice(JSON_TEXTS)}}}"
    return text


def odd_file(path: Path, rng: random.Random) -> None:
    """Something at a path that is no regular file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = rng.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(path.name)  # to itself
    elif kind == 3:
        path.symlink_to("nowhere")
    elif kind == 4 and len(os.fsencode(path)) < 100:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(str(path))
    else:
        make_zero(path)


def make_zero(path: Path) -> None:
    """A private node like /dev/zero; a FIFO where this user may make no nodes."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o444, os.makedev(1, 5))
    except OSError:
        os.mkfifo(path)
