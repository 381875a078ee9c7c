"""Word errors: edits by hand, rates, texts made plain. CLIP score by hand."""

from __future__ import annotations

import pytest
import torch

from mmaccel.evaluation.quality.clip_score import score_batches
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
        ("un caf\u00e9", "un\tcafe\u0301", (0, 0, 0, 2)),
    ],
)
def test_edits_by_hand(reference: str, heard: str, wanted: tuple[int, ...]) -> None:
    found = count_word_errors(reference, heard)
    assert (found.substitutions, found.deletions, found.insertions, found.words) == wanted


def test_rates_are_of_all_words_together() -> None:
    parts = compare_transcripts(["a b c d", "a"], ["a b c d", "x y"])
    total = sum_word_errors(parts)
    assert [p.edits for p in parts] == [0, 2] and parts[1].rate == 2.0
    assert total == WordErrors(1, 0, 1, 5) and total.rate == 0.4


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "  Hello, World!  It\u2019s a well-known \u2014 \u201cfact\u201d.",
            "hello world it's a well-known fact",
        ),
        ("Stra\u00dfe, 'quoted'", "strasse quoted"),
        ("don\u02bct well\u2011known \uff21", "don't well-known a"),
        ("yes,no", "yes no"),
    ],
)
def test_plain_texts(text: str, wanted: str) -> None:
    assert simplify(text) == wanted


def test_clip_score_by_hand() -> None:
    table = torch.tensor([[3.0, 4.0], [0.0, 2.0], [-1.0, 0.0]])

    def embed(images: torch.Tensor, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        return table[images[:, 0, 0, 0].long()], torch.tensor([[len(t), 0.0] for t in texts])

    images = torch.arange(3, dtype=torch.uint8)[:, None, None, None].expand(3, 3, 2, 2)
    found = score_batches([(images[:2], ["a", "bb"]), (images[2:], ["ccc"])], embed)
    assert found.scores.tolist() == pytest.approx([60.0, 0.0, 0.0])
    assert found.mean == pytest.approx(20.0)
    assert found.half_width == pytest.approx(1.96 * 1200**0.5 / 3**0.5)  # variance of 60, 0, 0
