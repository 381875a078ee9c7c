"""A model of transformers under a policy: the image pipeline's own tokens and passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from benchmarks.route_runs import Routes, Way, make_ways, summarize
from tests.fixtures.tiny_lms import PassCounter

CAPTIONS = [
    "a red circle on grass",
    "a large blue ring left of a large red square on snow",
    "the little orange triangle to the left of a big purple square",
]
SEEDS = [5, 6, 7]
LENGTH = 48


@pytest.fixture(scope="module")
def routes() -> Routes:
    return Routes("scenes", LENGTH)


@pytest.mark.parametrize(
    "policy", [mmaccel.Autoregressive(), mmaccel.Jacobi(16, "neighbour")], ids=repr
)
@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_attached_it_makes_the_pipelines_tokens_in_as_many_passes(
    routes: Routes, rows: int, guidance: float, policy: Any
) -> None:
    captions, seeds = CAPTIONS[-rows:], SEEDS[-rows:]
    with PassCounter(routes.model) as counter:
        ours = routes.run(Way("transformers", policy, rows, guidance), captions, seeds)
    direct = routes.run(Way("direct", policy, rows, guidance), captions, seeds)
    assert ours.stats is not None and direct.stats is not None
    assert ours.tokens.shape == (rows, LENGTH) and torch.equal(ours.tokens, direct.tokens)
    assert ours.stats.row_passes == direct.stats.row_passes
    assert ours.stats.passes == direct.stats.passes == counter.passes - 1
    assert ours.stats.tokens_per_pass == direct.stats.tokens_per_pass
    if isinstance(policy, mmaccel.Jacobi):
        assert ours.stats.tokens_per_pass > 2  # random drafts alone would give 1


@pytest.mark.parametrize("policy", [mmaccel.SpeculativeJacobi(window=16)], ids=repr)
def test_drafts_are_the_same_where_they_decide_the_tokens(routes: Routes, policy: Any) -> None:
    ours = routes.run(Way("transformers", policy, 3, 2.0), CAPTIONS, SEEDS)
    direct = routes.run(Way("direct", policy, 3, 2.0), CAPTIONS, SEEDS)
    assert torch.equal(ours.tokens, direct.tokens)


def test_the_librarys_own_makes_images_one_token_a_pass(routes: Routes) -> None:
    with PassCounter(routes.model_of("library")) as counter:
        own = routes.run(Way("library", None, 3, 2.0), CAPTIONS, SEEDS)
    assert counter.passes == 2 * LENGTH and own.stats is None  # guidance has passes of its own
    assert own.tokens.shape == (3, LENGTH) and int(own.tokens.max()) < 1000


def test_rows_compare_what_all_ways_have_finished() -> None:
    from benchmarks.route_runs import PLAIN, Piece

    def piece(seconds: float, tokens: list[list[int]], passes: int | None) -> Piece:
        stats = None if passes is None else mmaccel.Stats(tokens=4, row_passes=passes)
        return Piece(torch.tensor(tokens), stats, seconds)

    jacobi = mmaccel.Jacobi(16)
    made = {
        Way("library", None, 1, 2.0, ""): [piece(4.0, [[1, 2, 3, 4]], None)] * 2,
        Way("transformers", PLAIN, 1, 2.0): [piece(5.0, [[5, 6, 7, 8]], 4)] * 2,
        Way("transformers", jacobi, 1, 2.0): [piece(1.0, [[5, 6, 7, 8]], 2)] * 2,
        Way("direct", jacobi, 1, 2.0): [piece(0.8, [[5, 6, 7, 9]], 2)],  # Ctrl-C came
        Way("library", None, 8, 2.0, ""): [],
        Way("transformers", PLAIN, 8, 2.0): [],
    }
    rows = summarize(made)
    assert [row["images"] for row in rows] == [1] * 4
    assert [row["speed_up"] for row in rows] == [1.0, 0.8, 4.0, 5.0]
    assert [row["of_direct"] for row in rows] == [None, None, 1.25, None]
    assert [row["tokens_per_pass"] for row in rows] == [1.0, 1.0, 2.0, 2.0]
    assert [row["identical"] for row in rows] == [0, 1, 1, 0]
    assert len(make_ways([1, 8], [1.0, 2.0])) == 4 * 9
    assert len(make_ways([1], [1.0], [32], "auto", ("model", "fused"), True)) == 2 + 2 * 4
