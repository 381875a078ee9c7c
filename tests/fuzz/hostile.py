"""Values and bytes that no command expects."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKER = "code-ran"  # a file that only code of an input would make

NUMBERS = (
    "-1", "0", "1000000000", "9" * 400, "9" * 5000, "1e9", "0x10", "1_0", "\u0663", "", " ", "nan",
    "inf", "-inf", "1.5", "1e308", "1e-320", "1e400", "1,5", "1e", "--", "\x1b[31m1", "true",
)  # fmt: skip
TEXTS = (
    "", " ", "\n", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b31m", "[red]x[/nope]",
    "\u202eabc\u202c", "a\nb", "\u2028", "\U0001d54f" * 50, "x" * 300, "x" * 5000, "..", "../../x",
    "-", "zero.jsonl", "fifo.jsonl", "loop.txt", "folder.txt", "zero.png", "fifo.png", ".",
    "empty.jsonl", "none/x", "--help", "%s%n%d", "{0}{name}", "${HOME}", f"$(touch {MARKER})",
    f"; touch {MARKER}", "a\udcffb", "cuda", "cuda:99999999999", "meta", "all", "canvas", "scenes",
    "x" * 70 + "/y", "owner/name", "a/b/c", "~root", "a" * 256, "os:system", "builtins:exit", ":",
    "os:", "..:x", "json.tool:main", "1/0", "5/4", "0/1", "9" * 5000 + "x" + "9" * 5000,
    "99999x99999", "1x",
)  # fmt: skip
PLAUSIBLE = (  # what people write by mistake
    "no", "off", "True", "none", "auto", "0", "1", "2", "99", "-1", "1.0", "0.5", "50%", "0,5",
    "1e-300", "1e9", "9223372036854775808", "[1, 2]", "(0.1, nan)", "{}", "cuda", "float16",
    "16x16", "1/2", "nan", "inf", "-0.1", "1.5", "+4",
)  # fmt: skip
LITERALS = (
    "", "{[]:1}", "{}", "[[]]", "(1,)", "{(): []}", "[" * 2000, "(" * 300 + ")" * 300,
    "{" * 90 + "}" * 90, "-" * 5000 + "1", "9" * 5000, "0x" + "f" * 4000, "1e999", "1j", "b'x'",
    "...", "\x1b[31m", f"__import__('os').system('touch {MARKER}')", "lambda: 1", "f'{1}'",
    "x" * 20_000, "1" + "+1" * 3000, "'a'" * 2000, "\\", "[1, 2", "1__0", "1e-320", "a\udcffb",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 2**31, 2**63, 2**64, 10**39, 10**400, 1e308, 1e-320, float("inf"),
    float("nan"), "", " ", "\x1b[31m", "\x00", "\ud800", "x" * 30_000, [], [[]], {}, {"a": {}},
    "jacobi", "8", "nan", [None] * 1000, "../../etc/x", "64x64", "99999x99999", "[red]x[/nope]",
)  # fmt: skip
JSON_TEXTS = (
    "[" * 63 + "]" * 63, "[" * 900 + "]" * 900, "[" * 100_000, '{"a":' * 990 + "1" + "}" * 990,
    "9" * 6000, "NaN", "1e999", "null", "3", "[]", "{}", '{"a": 1, "a": 2}', '"\\ud800"', "'x'",
    "{", "\x00", "\ufeff{}", '"' + "x" * 2_000_000 + '"',
)  # fmt: skip


def some_bytes(rng: random.Random) -> bytes:
    """The content of a file that is none of the formats read here, or nearly one."""
    text = rng.choice(JSON_TEXTS + TEXTS)
    kinds = (
        b"", bytes(100_000), b"\xff\xfe" + "a red circle\n".encode("utf-16-le") * 3, b"\n" * 99_999,
        b"x" * (2**20 + 1), b'"' + b"a,\n" * 5000, "\u0301\u0316".encode() * 9_999,
        rng.randbytes(300), text.encode("utf-8", "surrogatepass"), b"\x80\x04\x95" + bytes(60),
    )  # fmt: skip
    return rng.choice(kinds)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Bytes of a valid file with some of them changed, lost, repeated or inserted."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 30))):
        at = rng.randrange(len(found) + 1)
        until = min(len(found), at + rng.choice((1, 1, 2, 8, 100)))
        inserted = rng.choice(JSON_TEXTS[:4] + TEXTS).encode("utf-8", "surrogatepass")
        found[at:until] = rng.choice(
            (b"", rng.randbytes(until - at), bytes(found[at:until]) * 50, inserted)
        )
    return bytes(found)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """JSON objects, one a line or one in all, with fields changed, lost, renamed or added."""
    lines = data.decode("utf-8").splitlines() if data.count(b"\n{") else [data.decode("utf-8")]
    objects = [dict(json.loads(line)) for line in lines]
    found: dict[str, Any] = rng.choice(objects)
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice([*found, "extra"])
        other = rng.choice((name, name, "", "prompt", "\x1b[2J", "__class__", "id"))
        found[other] = rng.choice((*VALUES, found.pop(name, 1)))
    return "\n".join(map(json.dumps, objects)).encode("utf-8", "surrogatepass")


def spoil(file: Path, rng: random.Random) -> None:
    """A file becomes another one, a folder or a link; sizes of transformers' configurations stay,
    because transformers builds whatever they ask for.
    """
    if not file.is_file():
        return
    data = file.read_bytes()
    file.unlink()
    kind = rng.random()
    odd: tuple[Callable[[], object], ...] = (
        file.mkdir,
        lambda: file.symlink_to(file.name),  # to itself
        lambda: file.symlink_to("nowhere"),
    )
    if kind < 0.1:
        rng.choice(odd)()
    elif file.suffix in (".json", ".jsonl") and file.name != "config.json" and kind < 0.6:
        try:
            file.write_bytes(mutate_json(data, rng))
        except (ValueError, TypeError, RecursionError):  # it was spoiled before
            file.write_bytes(mutate(data, rng))
    else:
        file.write_bytes(mutate(data, rng) if kind < 0.6 else some_bytes(rng))
