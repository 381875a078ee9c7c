"""Measurements: features, samples, words and embeddings that no figure can be made of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mmaccel.errors import MissingBackendError, NumericsError, ShapeError
from mmaccel.evaluation.exactness.g_test import import_stats
from mmaccel.evaluation.exactness.mmd import measure_power, permutation_test
from mmaccel.evaluation.quality.clip_score import score_batches
from mmaccel.evaluation.quality.frechet import frechet_of
from mmaccel.evaluation.quality.kid import measure_kid, squared_mmd
from mmaccel.evaluation.quality.word_errors import compare_transcripts, count_word_errors, simplify
from tests.messages.case import Refused

GOOD = [[1.0, 2.0], [3.0, 4.0]]
ITEMS = np.random.default_rng(0).normal(size=(40, 3))
NAN, INFINITE = float("nan"), float("inf")


def _distance(first: Any, second: Any = GOOD) -> Callable[[], Any]:
    return lambda: frechet_of(first, second)


def _test(**options: Any) -> Callable[[], Any]:
    return lambda: permutation_test(ITEMS[:20], ITEMS[20:], **options)


def _score(images: torch.Tensor, texts: torch.Tensor) -> Callable[[], Any]:
    batch = (torch.zeros(3, 3, 2, 2, dtype=torch.uint8), ["a"] * 3)
    return lambda: score_batches([batch], lambda *_: (images, texts))


def _without(module: str, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            call()

    return run


FEATURES = (
    Refused("one item", _distance([[1.0, 2.0]]), ("first", "at least 2", "[1, 2]"), ShapeError),
    Refused("one item, second", _distance(GOOD, [[1.0, 2.0]]), ("second", "[1, 2]"), ShapeError),
    Refused("no rows", _distance([1.0, 2.0]), ("[2]", "one row"), ShapeError),
    Refused("unlike widths", _distance([[1.0], [2.0]]), ("1 and 2", "one extractor"), ShapeError),
    Refused(
        "features that are no numbers",
        _distance([[1.0, 2.0], [NAN, 0.0], [INFINITE, 0.0]]),
        ("2 of 3 rows", "extractor"),
        NumericsError,
    ),
    Refused("complex features", _distance([[1j], [2j]]), ("complex", "parts"), ShapeError),
    Refused(
        "subsets of one",
        lambda: measure_kid(GOOD, GOOD, subsets=3, subset_size=1),
        ("subsets", "3 of 1", "100 of 1000"),
    ),
    Refused(
        "cubes that overflow",
        lambda: squared_mmd(ITEMS * 1e120, ITEMS),
        ("e+120", "scale them"),
        NumericsError,
    ),
    Refused(
        "distances that overflow",
        lambda: permutation_test(ITEMS[:20] * 1e200, ITEMS[20:]),
        ("e+200", "scale them"),
        NumericsError,
    ),
)
TESTS = (
    Refused(
        "groups without items of both sets",
        _test(groups=([0] * 20, [1] * 20)),
        ("groups", "items of both sets", "the same number"),
    ),
    Refused(
        "groups of another length",
        _test(groups=([0], [1] * 20)),
        ("groups", "20 and 20", "1 and 20"),
        ShapeError,
    ),
    Refused("few permutations", _test(permutations=18), ("permutations", "19", "18", "999")),
    Refused(
        "few permutations for a level",
        lambda: measure_power(ITEMS, (9, 9), permutations=39, level=0.01),
        ("at least 99", "0.01", "39"),
    ),
)
WORDS = (
    Refused(
        "marks without letters",
        lambda: simplify("a" + "\u0315\u0300" * 501),
        ("utterance", "1000 combining marks", "take the line out"),
    ),
    Refused(
        "a rate of no words",
        lambda: count_word_errors("", "a").rate,
        ("reference", "at least one word"),
    ),
    Refused(
        "fewer transcripts than references",
        lambda: compare_transcripts(["a", "b"], ["a"]),
        ("expected 2", "received 1", "an empty line"),
        ShapeError,
    ),
)
EMBEDDINGS = (
    Refused(
        "fewer texts than images",
        _score(torch.ones(3, 2), torch.ones(2, 2)),
        ("two of [3, D]", "[3, 2] and [2, 2]"),
        ShapeError,
    ),
    Refused(
        "an embedding of nothing",
        _score(torch.ones(3, 2), torch.zeros(3, 2)),
        ("other than 0", "callable"),
        NumericsError,
    ),
)
MISSING = tuple(
    Refused(f"without {module}", _without(module, call), (module, remedy), MissingBackendError)
    for module, call, remedy in (
        ("jiwer", lambda: count_word_errors("a", "b"), "pip install 'mmaccel[evaluation]'"),
        ("scipy", import_stats, "pip install 'mmaccel[evaluation]'"),
    )
)
CASES = (*FEATURES, *TESTS, *WORDS, *EMBEDDINGS, *MISSING)
