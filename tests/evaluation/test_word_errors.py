"""Word errors: edits by hand and by search, rates, texts made plain. CLIP score by hand."""

from __future__ import annotations

import functools
import random
import sys
import time

import pytest
import torch

from mmaccel.errors import MissingBackendError, NumericsError, OptionError, ShapeError
from mmaccel.evaluation.exactness.g_test import import_stats
from mmaccel.evaluation.quality import word_errors
from mmaccel.evaluation.quality.clip_score import score_captions
from mmaccel.evaluation.quality.word_errors import (
    WordErrors,
    compare_transcripts,
    count_word_errors,
    simplify,
    sum_word_errors,
)


@pytest.mark.parametrize(
    ("reference", "heard", "wanted"),
    [
        ("a b c", "a b c", (0, 0, 0, 3)),
        ("a b c", "a x c", (1, 0, 0, 3)),
        ("a b c", "a c", (0, 1, 0, 3)),
        ("a b c", "a b x c", (0, 0, 1, 3)),
        ("a b", "x y z", (2, 0, 1, 2)),
        ("a b c", "", (0, 3, 0, 3)),
        ("", "a  b", (0, 0, 2, 0)),
        ("the cat sat on the mat", "a cat sat the mat now", (1, 1, 1, 6)),
    ],
)
def test_edits_by_hand(reference: str, heard: str, wanted: tuple[int, ...]) -> None:
    found = count_word_errors(reference, heard)
    assert (found.substitutions, found.deletions, found.insertions, found.words) == wanted


def test_edits_are_the_least_and_of_these_most_are_substitutions() -> None:
    @functools.cache
    def least(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[int, int]:
        """Edits, and substitutions below 0, so that the smaller pair is the better one."""
        if not a or not b:
            return len(a) + len(b), 0
        ways = [(least(a[1:], b), 1, 0), (least(a, b[1:]), 1, 0)]
        ways += [(least(a[1:], b[1:]), a[0] != b[0], a[0] != b[0])]
        return min((edits + one, swaps - swap) for (edits, swaps), one, swap in ways)

    draw = random.Random(0)
    for _ in range(200):
        a, b = (tuple(draw.choices("xyz", k=draw.randrange(7))) for _ in range(2))
        found = count_word_errors(" ".join(a), " ".join(b))
        assert (found.edits, -found.substitutions) == least(a, b)
        assert len(a) - found.deletions + found.insertions == len(b)


def test_long_utterances_have_the_edits_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    for k in range(300):
        size = draw.choice((2, 5, 40))
        a = [str(draw.randrange(size)) for _ in range(draw.randrange(1, 30))]
        b = [word for word in a if draw.random() < 0.8] + ["x"] * draw.randrange(1, 4)
        b = b if k % 2 else draw.choices(a, k=draw.randrange(1, 30))
        texts = " ".join(a), " ".join(b)
        with monkeypatch.context() as patch:
            patch.setattr(word_errors, "_SMALL", 0)
            found = count_word_errors(*texts)
        assert found == count_word_errors(*texts)


def test_a_book_on_one_line_is_compared_within_seconds() -> None:
    draw, began = random.Random(2), time.process_time()
    words = [str(draw.randrange(3000)) for _ in range(30_000)]
    heard = [word for k, word in enumerate(words) if k % 20] + ["end"]
    found = count_word_errors(" ".join(words), " ".join(heard))
    assert found.edits == 1501 and found.words == 30_000
    assert time.process_time() - began < 10  # 38 s when every pair of words was compared


def test_what_cannot_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_errors, "MAX_CELLS", 300_000)
    with pytest.raises(OptionError, match="at most 300000 pairs of words to compare, received 600"):
        count_word_errors("a " * 600, "b " * 600)
    with pytest.raises(OptionError, match="at most 1000 combining marks in a row"):
        simplify("a" + "\u0315\u0300" * 501)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidfuzz.distance", None)
    monkeypatch.setitem(sys.modules, "scipy", None)
    for ask in (lambda: count_word_errors("a", "b"), import_stats):
        with pytest.raises(MissingBackendError, match=r"pip install 'mmaccel\[evaluation\]'"):
            ask()


def test_rates_are_of_all_words_together() -> None:
    parts = compare_transcripts(["a b c d", "a"], ["a b c d", "x y"])
    total = sum_word_errors(parts)
    assert [p.edits for p in parts] == [0, 2] and parts[1].rate == 2.0
    assert total == WordErrors(1, 0, 1, 5) and total.rate == 0.4
    with pytest.raises(OptionError, match="at least one word"):
        _ = count_word_errors("", "a").rate
    with pytest.raises(ShapeError, match="expected 2, one for each reference, received 1"):
        compare_transcripts(["a", "b"], ["a"])


def test_plain_texts() -> None:
    assert simplify("  Hello, World!  It’s a well-known — “fact”.") == (
        "hello world it's a well-known fact"
    )
    assert simplify("Straße, 'quoted'") == "strasse quoted"


def test_clip_score_by_hand() -> None:
    images = [torch.full((3, 2, 2), k, dtype=torch.uint8) for k in range(3)]
    table = torch.tensor([[3.0, 4.0], [0.0, 2.0], [-1.0, 0.0]])
    seen: list[int] = []

    def embed(batch: torch.Tensor, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(texts))
        own = batch[:, 0, 0, 0].long()
        return table[own], torch.tensor([[float(len(t)), 0.0] for t in texts])

    found = score_captions(images, ["a", "bb", "ccc"], embed, batch_size=2)
    assert seen == [2, 1]
    assert found.scores.tolist() == pytest.approx([60.0, 0.0, 0.0])
    assert found.mean == pytest.approx(20.0)
    assert found.half_width == pytest.approx(1.96 * 1200**0.5 / 3**0.5)  # variance of 60, 0, 0
    with pytest.raises(ShapeError, match="received 2 for 3"):
        score_captions(images, ["a", "b"], embed)
    with pytest.raises(ShapeError, match=r"two of \[3, D\], received \[3, 2\] and \[2, 2\]"):
        score_captions(images, ["a"] * 3, lambda p, t: (table, table[:2]))
    with pytest.raises(NumericsError, match="other than 0"):
        score_captions(images, ["a"] * 3, lambda p, t: (table, 0 * table))
