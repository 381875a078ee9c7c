"""Prompts in chunks: what passes process, that rows go on beside them, and that tokens stay.

That a row whose prompt comes in chunks is the row alone, under every policy and in every way that
rows come, is proved in `tests/matrix/test_batching.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import (
    Autoregressive,
    CausalLMWindow,
    ContinuousBatching,
    Jacobi,
    Speculative,
)
from mmaccel.contracts import FinishedRow, Pass, Prompt
from mmaccel.pipelines.hosts.layers import attention
from mmaccel.pipelines.hosts.layers.mixed_pass import MixedPass
from mmaccel.pipelines.hosts.layers.store import KVCacheLayout
from mmaccel.results import Progress
from mmaccel.samplers.drafting.triforce import TriForce
from mmaccel.samplers.prompt_chunks import PromptFeed, prefill_together
from mmaccel.samplers.window.rows import RunRows
from tests.fixtures.arriving import Arriving
from tests.fixtures.graph_replay import Replay
from tests.window.prefix_runs import Patch, Texts, Watched, alone, ids

SIZE = 6
TEXTS = Texts(  # tokens of each, and of their unconditional branches
    [ids(n, row) for row, n in enumerate([3, 20, 9, 1, 14])],
    [ids(n, 50 + row) for row, n in enumerate([2, 5, 17, 1, 14])],
    16,
    Autoregressive(),
)
decode, decode_joined, assert_alone = TEXTS.decode, TEXTS.decode_joined, TEXTS.assert_alone


def test_a_row_gains_a_token_in_every_pass_beside_the_chunks_of_another() -> None:
    """In as many calls of the model as there are passes, where there were twice as many."""
    window, gained = Watched(size=SIZE), []

    def on_step(progress: Progress) -> None:
        gained.append((progress.lengths - progress.previous).tolist())

    made, given = decode_joined(window, [0], [1], on_step=on_step)
    assert_alone(given, [0, 1])
    beside = ("mixed", 2, 1, (6,))
    chunks = [("mixed", 1, 1, (2,)), beside, beside, beside, ("mixed", 2, 1, (1,))]
    assert window.seen[:5] == chunks
    assert all(kind == "window" for kind, *_ in window.seen[5:])
    assert gained[:5] == [[1], [1, 0], [1, 0], [1, 0], [1, 1]]
    assert (made.stats.prefill_passes, made.stats.passes) == (0, len(window.seen))
    n_windows = sum(rows * width for _, rows, width, *_ in window.seen)
    assert made.stats.tokens_processed == n_windows + 2 + 19

    apart = Watched(size=SIZE, apart=True)
    other, given = decode_joined(apart, [0], [1])
    assert_alone(given, [0, 1])
    assert apart.seen[2:4] == [("prompt", 1, 6), ("window", 2, 1)]
    assert (other.stats.prefill_passes, other.stats.passes) == (5, made.stats.passes)
    assert other.stats.tokens_processed == made.stats.tokens_processed
    assert "prefill_chunk_size: chunks had passes of their own: a test" in other.stats.notes


@pytest.mark.parametrize(
    ("size", "scale", "apart"), [(3, 1.0, False), (5, 2.0, False), (5, 2.0, True)]
)
def test_no_pass_feeds_more_than_the_budget(size: int, scale: float, apart: bool) -> None:
    """Nor do those between two windows together; newcomers and their branches are ragged."""
    window, others = Watched(size=size, apart=apart), [1, 2, 3, 4]
    _, given = decode_joined(window, [0], others, scale=scale, length=40)
    assert_alone(given, [0, *others], scale, length=40)
    kinds = [kind for kind, *_ in window.seen]
    first = min(kinds.index(kind) for kind in ("window", "mixed") if kind in kinds)
    assert all(rows * width <= size for _, rows, width in window.seen[:first])
    n_between = 0
    for kind, rows, width, *sizes in window.seen[first:]:
        n_new = sum(sizes[0]) if sizes else rows * width * (kind == "prompt")
        n_between = n_new + n_between * (kind == "prompt")
        assert n_between <= size
    assert set(kinds[first:]) == {"window", "prompt" if apart else "mixed"}


def test_a_newcomer_is_admitted_when_the_chunk_has_room() -> None:
    """So that passes have no rows that wait behind a long prompt.

    With 20 tokens, 14 and 9; each joins in the chunk with the last tokens of the one before.
    """
    window, given, shown = Watched(size=SIZE), [], []
    arriving = Arriving([1, 4, 2], TEXTS.read, gap=1)
    batching = ContinuousBatching(4, given.append, arriving)
    decode(window, [0], batching, width=20, on_step=lambda each: shown.append(each.rows))
    assert_alone(given, [0, 1, 4, 2])
    first = {row: min(k for k, rows in enumerate(shown) if row in rows) for row in range(4)}
    assert first == {0: 0, 1: 0, 2: 3, 3: 5}
    assert set(arriving.asked) == {1}


def test_rows_with_which_a_run_begins_decode_as_soon_as_they_can() -> None:
    window, shown = Watched(size=SIZE), []

    def on_step(progress: Progress) -> None:
        shown.append((progress.lengths - progress.previous).tolist())

    given: list[FinishedRow] = []
    decode(window, [0, 1, 2], ContinuousBatching(3, given.append), on_step=on_step)
    assert_alone(given, [0, 1, 2])
    assert shown[0] == [1, 0, 0] and [1, 1, 0] in shown and [1, 1, 1] in shown


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_chunks_leave_what_whole_prompts_leave(name: str) -> None:
    """Logits after ragged prompts, also of layers that slide."""
    made = []
    for size in (None, 1, 9):
        window = Watched(name, dtype=torch.float64)
        given = TEXTS.read([1, 0, 2])
        window.reserve(3, 40)
        n = prefill_together(window, given.tokens[:, :-1], given.lengths - 1, size)
        assert n == (1 if size is None else -(-19 // max(size // 3, 1)))
        last = given.tokens.gather(1, given.lengths[:, None] - 1 + torch.zeros(1, 3).long())
        made.append(window.forward(Pass(last, given.lengths - 1)))
    for other in made[1:]:
        torch.testing.assert_close(other, made[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("batching", [False, True])
def test_the_prompt_of_a_draft_model_comes_in_chunks_too(batching: bool) -> None:
    window, drafter, given = Watched(size=SIZE), Watched("qwen2", SIZE), []
    policy = Speculative(4, drafter)
    chosen = ContinuousBatching(2, given.append) if batching else None
    made = decode(window, [1, 0, 2], chosen, policy=policy)
    widest = max(rows * width for kind, rows, width in drafter.seen if kind == "prompt")
    assert widest <= SIZE
    for row, number in enumerate([1, 0, 2]):
        own = decode(Watched(), [number], policy=Speculative(4, Watched("qwen2")))
        assert made.tokens[row].equal(own.tokens[0])


def test_a_model_that_drafts_for_itself_has_whole_prompts_in_its_cache() -> None:
    """It drafts before the pass that would process the last of them."""
    policy = Speculative(4, drafts=TriForce(budget=0.5, block=2))
    window, given = Watched(size=SIZE), list[FinishedRow]()
    made = decode(window, [1, 0, 2], ContinuousBatching(2, given.append), policy=policy)
    assert all(kind != "mixed" for kind, *_ in window.seen)
    assert any("TriForce(" in note for note in made.stats.notes)
    for row, number in enumerate([1, 0, 2]):
        own = decode(Watched(), [number], policy=policy)
        assert made.tokens[row].equal(own.tokens[0])


def test_captured_steps_go_on_beside_chunks_that_run_eagerly() -> None:
    window = Watched(size=SIZE)
    window.setup.runner = Replay()
    given: list[FinishedRow] = []
    made = decode(window, [0, 1, 2, 4], ContinuousBatching(2, given.append), policy=Jacobi(4))
    assert made.stats.runner == "cuda graphs" and len(window.setup.runner.recorded) == 1
    assert "prefill_chunk_size: passes with chunks ran eagerly" in made.stats.notes
    n_mixed = sum(kind == "mixed" for kind, *_ in window.seen)
    assert made.stats.passes - n_mixed - window.setup.runner.replayed <= 2 < n_mixed
    for row in given:
        own = decode(Watched(), [[0, 1, 2, 4][row.row]], policy=Jacobi(4))
        assert row.tokens.tolist() == own.tokens[0].tolist()


def test_a_row_that_nobody_waits_for_leaves_before_its_prompt_is_whole() -> None:
    window, given, shown = Watched(size=2), [], []

    def on_step(progress: Progress) -> Tensor | None:
        shown.append(progress.rows)
        if 1 not in progress.rows or len(shown) < 4:
            return None
        return torch.tensor([0 if row == 1 else 99 for row in progress.rows])

    arriving = Arriving([1, 2], TEXTS.read, gap=1, most=1)
    batching = ContinuousBatching(4, given.append, arriving)
    decode(window, [0], batching, width=20, on_step=on_step)
    ended = {row.row: row for row in given}
    assert ended[1].tokens.numel() == 0 and ended[1].passes == 0 and ended[1].accepted == []
    assert ended.keys() == {0, 1, 2} and all(1 not in rows for rows in shown[4:])
    for row, number in ((0, 0), (2, 2)):
        own = alone(TEXTS, number)
        assert ended[row].tokens.tolist() == own.tokens[0].tolist()


def _restart_positions(patch: Patch) -> None:
    """The positions of every piece count from 0."""
    compute = CausalLMWindow.run_forward

    def wrong(own: Any, tokens: Tensor, positions: Tensor, *others: Any, **options: Any) -> Any:
        for this in others:
            if isinstance(this, MixedPass):
                sizes = [len(piece.tokens) for piece, _ in this.pieces]
                windows, *pieces = positions.split([positions.shape[1] - sum(sizes), *sizes], 1)
                pieces = [piece - piece[:, :1] for piece in pieces]
                positions = torch.cat([windows, *pieces], 1)
        return compute(own, tokens, positions, *others, **options)

    patch.setattr(CausalLMWindow, "run_forward", wrong)


def _shift_masks(patch: Patch) -> None:
    """Entries of a piece see one behind them, too."""
    make_mask = attention.make_mask

    def wrong(positions: Tensor, *others: Any) -> Any:
        return make_mask(positions + (positions.shape[1] > 1), *others)

    patch.setattr(attention, "make_mask", wrong)


def _write_elsewhere(patch: Patch) -> None:
    """What a piece writes goes to the row before its own."""
    add_row = KVCacheLayout.add_row

    def wrong(layout: KVCacheLayout, row: int, *others: int) -> KVCacheLayout:
        return add_row(layout, max(row - 1, 0), *others)

    patch.setattr(KVCacheLayout, "add_row", wrong)


def _begin_early(patch: Patch) -> None:
    """Rows decode, and cache what they draw, before their prompts are whole."""

    def wrong(feed: PromptFeed) -> list[int]:
        rows = [*feed.cursors]
        feed.cursors.clear()
        return rows

    patch.setattr(PromptFeed, "take_whole", wrong)


def _write_over_prompts(patch: Patch) -> None:
    """What passes write for a row that waits begins at its first token."""
    hold = RunRows.hold

    def wrong(rows: RunRows, batch_slots: Tensor, given: Prompt) -> None:
        hold(rows, batch_slots, given)
        rows.lengths[batch_slots] = 1

    patch.setattr(RunRows, "hold", wrong)


PLANTED: dict[str, Callable[[Patch], None]] = {
    "positions restart": _restart_positions,
    "a piece that sees what is behind": _shift_masks,
    "a piece that is written to another row": _write_elsewhere,
    "drafts before the prompt is whole": _begin_early,
    "windows write over a prompt": _write_over_prompts,
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_planted_bugs_change_logits(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Those of the last pass, in which the row alone decodes whose prompt came in chunks."""
    whole = Watched()
    wanted = decode(whole, [1]).tokens[0].tolist()
    for bug in (None, plant):
        if bug is not None:
            bug(monkeypatch)
        window = Watched(size=SIZE)
        _, given = decode_joined(window, [0], [1])
        tokens = {row.row: row.tokens.tolist() for row in given}[1]
        difference = (window.last_logits[-1] - whole.last_logits[-1]).abs().max()
        is_same = tokens == wanted and bool(difference < 1e-5)
        assert is_same == (bug is None)
