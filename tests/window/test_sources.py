"""Draft sources against loops over plain lists."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mmaccel import Grid
from mmaccel.contracts import Layout
from mmaccel.samplers.drafting.contract import Drafts, Frontier
from mmaccel.samplers.drafting.sources import find_source
from mmaccel.samplers.sampling_params import SamplingParams

VOCAB = 4
ORIGIN = 5  # columns of prompt
GRID = Grid(rows=3, width=2, vocab_size=VOCAB, row_end=3)  # rows of 3 slots, images of 9


def propose(source: str, frontier: Frontier) -> Drafts:
    found = find_source(source)
    assert found is not None
    return found.propose(frontier)


def make_frontier(
    rows: list[list[int]],
    made: list[int],
    *,
    layout: Layout | None = GRID,
    seen: int = 0,
) -> Frontier:
    """A frontier of rows (prompt left-padded with -1 to `ORIGIN`, then tokens and drafts).

    Args:
        rows: contents up to the first column nothing has filled.
        made: tokens generated so far; the window begins after them.
        layout: of the slots.
        seen: 1 if a pass has left scores.
    """
    filled = [len(row) for row in rows]
    token_buffer = torch.tensor([row + [0] * (40 - len(row)) for row in rows])
    slots = torch.tensor([[m + k for k in range(WIDTH)] for m in made])
    scores = torch.arange(float(len(rows) * VOCAB)).reshape(-1, VOCAB) if seen else None
    return Frontier(token_buffer, ORIGIN, torch.tensor(filled), slots, scores, layout, VOCAB)


ROWS = [
    [-1, -1, 1, 2, 3] + [0, 1, 3, 2, 1, 3, 2],  # seven slots filled
    [0, 0, 0, 0, 0] + [2, 2],
    [-1, -1, -1, -1, 1],  # nothing yet
    [-1, 3, 1, 3, 1] + [3, 1],
]
MADE = [5, 2, 0, 1]
WIDTH = 8


def new_slots(made: int, row: list[int]) -> list[tuple[int, int]]:
    """(index in the window, column) of slots nothing has filled."""
    return [(k, ORIGIN + made + k) for k in range(WIDTH) if ORIGIN + made + k >= len(row)]


def copy_back(row: list[int], column: int, period: int) -> int:
    back = period
    while column - back >= len(row):
        back += period
    return row[column - back] if column - back >= ORIGIN else row[-1]


def continue_ngram(row: list[int], column: int) -> int:
    """The longest suffix up to 3, its most recent earlier occurrence, read on in a circle."""
    for n in (3, 2, 1):
        suffix = row[-n:]
        if len(suffix) < n or -1 in suffix:
            continue
        ends = [e for e in range(n - 1, len(row) - 1) if row[e - n + 1 : e + 1] == suffix]
        if ends:
            tail = row[ends[-1] + 1 :]
            return tail[(column - len(row)) % len(tail)]
    return row[-1]


@pytest.mark.parametrize("source", ["left", "above", "previous-frame", "ngram"])
def test_copying_sources(source: str) -> None:
    tokens, scores, *_ = propose(source, make_frontier(ROWS, MADE))
    assert scores is None and tokens is not None and tokens.shape == (4, WIDTH)
    checked = 0
    for b, (row, made) in enumerate(zip(ROWS, MADE)):
        for k, column in new_slots(made, row):
            wanted = {
                "left": lambda row=row, column=column: row[-1],
                "above": lambda row=row, column=column: copy_back(row, column, 3),
                "previous-frame": lambda row=row, column=column: copy_back(row, column, 9),
                "ngram": lambda row=row, column=column: continue_ngram(row, column),
            }[source]()
            assert int(tokens[b, k]) == wanted, (b, k)
            checked += 1
    assert checked == 6 + 8 + 8 + 7


def test_ngrams_of_many_random_lines() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(300):
        pad, n = torch.randint(0, 5, (1,), generator=generator), 9
        row = torch.randint(0, 3, (ORIGIN + n,), generator=generator)
        row[: int(pad)] = -1
        rows.append(row.tolist())
    tokens, *_ = propose("ngram", make_frontier(rows, [9] * 300))
    assert tokens is not None
    for b, row in enumerate(rows):
        assert tokens[b].tolist() == [continue_ngram(row, c) for _, c in new_slots(9, row)]


def continue_in_hierarchy(rows: list[list[int]], b: int, column: int, n: int = 2) -> int:
    """The latest occurrence in its own text, the other rows' or its prompt, read on in a circle."""
    row = rows[b]
    wanted = row[-n:]
    if len(wanted) < n or -1 in wanted:
        return row[-1]
    others = [other for i, other in enumerate(rows) if i != b]
    sources = (([row], ORIGIN, 99), (others, ORIGIN, 99), ([row], n, ORIGIN))
    for texts, low, high in sources:
        found = [
            (first, text)
            for text in texts
            for first in range(low, min(high, len(text)))
            if text[first - n : first] == wanted
        ]
        if found:
            first, text = max(found, key=lambda item: item[0])  # of equals the first row
            return text[first + (column - len(row)) % (len(text) - first)]
    return row[-1]


def test_hierarchy_of_many_random_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        made = torch.randint(0, 9, (3,), generator=generator).tolist()
        rows = [torch.randint(0, 4, (ORIGIN + n,), generator=generator).tolist() for n in made]
        pad = int(torch.randint(0, 5, (1,), generator=generator))
        rows[1][:pad] = [-1] * pad
        tokens, *_ = propose("hierarchy", make_frontier(rows, made))
        assert tokens is not None
        for b, row in enumerate(rows):
            expected = [continue_in_hierarchy(rows, b, c) for _, c in new_slots(made[b], row)]
            assert tokens[b].tolist() == expected


def test_neighbour_is_the_last_distribution() -> None:
    tokens, scores, *_ = propose("neighbour", make_frontier(ROWS, MADE, seen=1))
    assert tokens is None and scores is not None
    assert scores.tolist() == [[[4 * b + v for v in range(4)]] for b in range(4)]


@pytest.mark.parametrize("source", ["random", "neighbour"])
def test_uniform_distribution(source: str) -> None:
    """Random drafts, and neighbours before any pass: uniform over what may stand there."""
    tokens, scores, *_ = propose(source, make_frontier(ROWS, MADE))
    assert tokens is None and scores is not None
    assert scores.softmax(-1).expand(4, WIDTH, VOCAB).eq(0.25).all()
    masked = Grid(rows=2, width=2, vocab_size=VOCAB, tokens=(1, 3))
    _, scores, *_ = propose(source, make_frontier(ROWS, MADE, layout=masked))
    assert scores is not None
    wanted = torch.tensor([0.0, 0.5, 0.5, 0.0]).expand(4, WIDTH, 4)
    assert scores.softmax(-1).expand(4, WIDTH, 4).equal(wanted)


def test_nothing_is_drafted_that_no_slot_can_have() -> None:
    plain = make_frontier(ROWS, MADE, layout=None)
    distribution = propose("random", replace(plain, impossible=torch.tensor([1, 3]))).scores
    assert distribution is not None
    assert distribution.softmax(-1)[:, 0].tolist() == [[0.5, 0, 0.5, 0]] * len(ROWS)


def test_the_impossible_ids_are_those_of_this_vocabulary() -> None:
    class Processor:
        impossible = torch.tensor([2, -1, 9, 3])

        def __call__(self, scores: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            return scores

    found = SamplingParams(processor=Processor()).impossible(VOCAB)
    assert found is not None and found.tolist() == [2, 3]
    assert SamplingParams().impossible(VOCAB) is None
