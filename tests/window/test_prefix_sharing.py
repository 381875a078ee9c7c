"""Prompts that begin alike and are read together: the tokens of private prompts, from one store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import (
    CausalLMWindow,
    Comb,
    ContinuousBatching,
    Jacobi,
    PrefixTree,
)
from mmaccel.contracts import FinishedRow
from mmaccel.pipelines.hosts.layers.shared_prefix import SharedPrefix
from mmaccel.results import Progress
from mmaccel.samplers.window.prefix_reader import PrefixReader
from tests.fixtures.arriving import Arriving
from tests.fixtures.graph_replay import Replay
from tests.window.prefix_runs import ALIKE, ALL, Patch, Watched, alone

decode = ALIKE.decode


def open_shared() -> PrefixTree:
    return PrefixTree(1000, chunk_size=4, least=2, shared_from=4)


class Readers:
    """Looks at what rows share after every pass, and ends a row after some of them.

    Attributes:
        n_bytes: of what is shared, after each pass.
    """

    def __init__(self, window: CausalLMWindow, ended: int = -1, n_passes: int = 0) -> None:
        self.n_bytes: list[int] = []
        self._window = window
        self._ended = ended
        self._n_passes = n_passes

    def __call__(self, progress: Progress) -> Tensor:
        prefix = self._window.run_caches().prefix
        self.n_bytes.append(0 if prefix is None else prefix.n_bytes)
        is_late = len(self.n_bytes) > self._n_passes
        ended = {self._ended} if is_late else set()
        assert progress.rows is not None
        return torch.tensor([0 if row in ended else 99 for row in progress.rows])


@pytest.mark.parametrize(
    ("first", "size", "scale", "name", "fused"),
    [
        (1, None, 2.0, "llama", True),
        (1, 3, 1.0, "gemma3, deep", False),
        (3, 7, 1.0, "llama", False),
        (5, None, 1.0, "gemma3, deep", True),
    ],
)
def test_rows_that_read_one_store_are_those_of_private_prompts(
    first: int, size: int | None, scale: float, name: str, fused: bool
) -> None:
    window, tree = Watched(name, fused=fused), open_shared()
    window.setup.prefill_chunk_size = size
    most = 2 if first == 5 else 4
    made, given = ALIKE.decode_joined(window, ALL[:first], ALL[first:], most, tree, scale)
    ALIKE.assert_alone(given, ALL, scale, name=name)
    assert made.stats.prefix_tokens == 24 + 28 + 16 + 12 * (scale != 1)
    assert any("68 tokens of prompts were read in one store" in note for note in made.stats.notes)
    assert window.run_caches().prefix is None  # the last row has left


@pytest.mark.parametrize("ended", [-1, 2])
def test_one_prompt_is_stored_once_until_its_last_reader_leaves(ended: int) -> None:
    window, tree = Watched(), open_shared()
    readers = Readers(window, ended, 6)
    given: list[FinishedRow] = []
    arriving = Arriving([2, 2, 2], ALIKE.read, 2, most=1)
    batching = ContinuousBatching(4, given.append, arriving, tree)
    decode(window, [0], batching, width=33, on_step=readers)
    ends = {row.row: row.tokens.tolist() for row in given}
    assert ends.keys() == {0, 1, 2, 3}
    for row, number in enumerate([0, 2, 2, 2]):
        own = alone(ALIKE, number).tokens[0].tolist()
        assert ends[row] == own if row != ended else ends[row] == own[: len(ends[row])]
    entry = sum(keys.nbytes + values.nbytes for keys, values in window.copy_entries(0, 0, 1))
    assert set(readers.n_bytes) == {0, 28 * entry}
    assert window.prompts == [[1, 28]]


def test_a_tree_of_drafts_behind_a_shared_prompt() -> None:
    window, policy = Watched(), Jacobi(4, tree=Comb(branches=2, length=2))
    given: list[FinishedRow] = []
    batching = ContinuousBatching(2, given.append, prefix_tree=open_shared())
    made = decode(window, [0, 1, 2], batching, policy=policy)
    assert made.stats.prefix_tokens == 24 + 28
    for row in given:
        own = decode(Watched(), [row.row], policy=policy)
        assert row.tokens.equal(own.tokens[0]) and row.passes == own.stats.passes


@pytest.mark.parametrize("case", ["layers that slide", "captured steps"])
def test_rows_have_copies_where_they_cannot_share(case: str) -> None:
    is_static = case == "captured steps"
    window, tree = Watched("llama" if is_static else "mistral"), open_shared()
    window.setup.runner = Replay() if is_static else None
    given: list[FinishedRow] = []
    made = decode(window, [0, 2], ContinuousBatching(1, given.append, prefix_tree=tree))
    assert made.stats.prefix_tokens == 28
    assert not any("prefix_tree" in note for note in made.stats.notes)
    window.setup.runner = None
    for row in given:
        assert row.tokens.equal(decode(window, [[0, 2][row.row]]).tokens[0])


def _read_another(patch: Patch) -> None:
    """Every row reads the prefix that was stored first."""
    join = SharedPrefix.join

    def wrong(prefix: SharedPrefix, row: int, key: Any, layers: Any) -> SharedPrefix:
        return join(prefix, row, "one", layers)

    patch.setattr(SharedPrefix, "join", wrong)


def _go_on_reading(patch: Patch) -> None:
    """A row that has ended leaves its prefix to the next one in its batch slot."""
    patch.setattr(PrefixReader, "begin", lambda reader, row: None)


def _read_nothing(patch: Patch) -> None:
    """Passes over what follows in a prompt do not see its beginning."""
    select = SharedPrefix.select
    patch.setattr(
        SharedPrefix, "select", lambda prefix, rows: select(SharedPrefix(prefix.lengths), rows)
    )


SHARING_BUGS: dict[str, Callable[[Patch], None]] = {
    "another prefix": _read_another,
    "the prefix of a row that has ended": _go_on_reading,
    "what follows sees no beginning": _read_nothing,
}


@pytest.mark.parametrize("bug", SHARING_BUGS)
def test_planted_bugs_of_sharing_are_seen(bug: str, monkeypatch: Patch) -> None:
    SHARING_BUGS[bug](monkeypatch)
    with pytest.raises((AssertionError, IndexError)):  # or writes before the store begins
        _, given = ALIKE.decode_joined(Watched(), ALL, [], 2, open_shared())
        ALIKE.assert_alone(given, ALL)
