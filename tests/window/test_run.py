"""The window loop: the model's inputs, where rows stop, counters, invalid scores, draft models."""

from __future__ import annotations

import torch

from mmaccel import (
    Grid,
    Jacobi,
    Noise,
    Prompt,
    SamplingParams,
    Speculative,
)
from mmaccel.samplers.window.run import WindowRun
from tests.fixtures.graph_recorder import Recorder
from tests.fixtures.toy_models import ToyLanguage, make_prompt, sample

ROWS = [[1, 2, 3], [4]]


def begin(
    model: Recorder, prompt: Prompt, length: int = 6, policy: Jacobi | None = None, n_noise: int = 0
) -> WindowRun:
    params = SamplingParams(guidance_scale=1.0 if prompt.branches == 1 else 2.0)
    noise = Noise.from_seed(0, n_noise or prompt.batch)
    run = WindowRun(policy or Jacobi(3), model, prompt, length, params=params, noise=noise)
    run.begin()
    return run


def step(run: WindowRun, drafts: list[list[int]], tokens: list[list[int]], kept: list[int]) -> None:
    """One pass: new drafts, the window's new contents, and how many of them are accepted."""
    run.write_drafts(torch.tensor(drafts, dtype=torch.int64))
    run.forward()
    is_right = torch.arange(run.width - 1) < torch.tensor(kept)[:, None] - 1
    run.accept(torch.tensor(tokens), is_right)
    run.sync()


def test_tokens_and_positions_of_ragged_rows() -> None:
    model = Recorder([0.0] * 10)
    run = begin(model, make_prompt(ROWS))
    assert model.reserved == (2, 3 + 6 - 1)  # the last token is never processed
    assert run.rows.tokens[:, :4].tolist() == [[1, 2, 3, 0], [-1, -1, 4, 0]]
    # The prompt without its last column; row 1 is padded with what the prompt holds there.
    assert model.calls == [([[1, 2], [4, 0]], [0, 0])]
    assert run.width == 3 and run.rows.slots.tolist() == [[0, 1, 2]] * 2
    assert not run.rows.is_predicted().any()

    step(run, [[5, 6], [5, 6]], [[7, 8, 9], [5, 6, 8]], [1, 3])
    assert model.calls[1] == ([[3, 5, 6], [4, 5, 6]], [2, 0])  # last prompt token and drafts
    assert run.rows.slots.tolist() == [[1, 2, 3], [3, 4, 5]]
    # Row 0 still holds two predictions as drafts; row 1 accepted all it had.
    assert run.rows.is_predicted().tolist() == [[True, True], [False, False]]

    step(run, [[0, 0], [1, 2]], [[8, 9, 4], [1, 3, 0]], [3, 2])
    assert model.calls[2] == ([[7, 8, 9], [8, 1, 2]], [3, 3])
    assert run.rows.n_generated.tolist() == [4, 5] and run.width == 2
    assert run.rows.is_predicted().tolist() == [[False], [True]]  # row 1: the third entry stands

    step(run, [[6], [6]], [[6, 2], [0, 9]], [2, 1])
    assert model.calls[3] == ([[4, 6], [3, 0]], [6, 5])
    assert run.width == 0
    made = run.finish()
    assert made.tokens.tolist() == [[7, 8, 9, 4, 6, 2], [5, 6, 8, 1, 3, 0]]
    assert made.lengths.tolist() == [6, 6]


def test_a_prompt_of_one_token_needs_no_pass_of_its_own() -> None:
    model = Recorder([0.0] * 10)
    run = begin(model, make_prompt([[4], [5]]))
    assert model.calls == [] and run.stats.prefill_passes == 0
    assert begin(model, make_prompt(ROWS)).stats.prefill_passes == 1


def test_forced_tokens_are_drafted_as_themselves() -> None:
    grid = Grid(rows=2, width=1, vocab_size=10, row_end=9)
    model = Recorder([0.0] * 10)
    run = begin(model, make_prompt(ROWS, layout=grid), policy=Jacobi(4))
    drafts = run.write_drafts(torch.tensor([[5, 6, 7], [5, 6, 7]]))
    assert drafts.tolist() == [[5, 9, 7], [5, 9, 7]]
    run.forward()
    assert model.calls[1][0] == [[3, 5, 9, 7], [4, 5, 9, 7]]


def test_counting() -> None:
    """accepted[k] counts row-passes of k + 1 tokens; ended rows and stops are left out."""
    model = Recorder([0.0] * 10)
    run = begin(model, make_prompt(ROWS, stop_tokens=torch.tensor([9])), length=6)
    step(run, [[0, 0]] * 2, [[1, 1, 1], [1, 9, 1]], [3, 3])  # 3 and 2: row 1 stops
    step(run, [[0, 0]] * 2, [[1, 1, 1], [1, 1, 1]], [2, 3])  # 2 and none
    step(run, [[]] * 2, [[1], [1]], [1, 1])
    made = run.finish()
    assert made.lengths.tolist() == [6, 2]
    assert made.tokens.tolist() == [[1] * 6, [1, 9, 0, 0, 0, 0]]
    stats = made.stats
    assert stats.accepted == [1, 2, 1]
    assert (stats.tokens, stats.passes, stats.row_passes, stats.prefill_passes) == (8, 3, 4, 1)
    assert stats.tokens_per_pass == 2.0
    assert stats.policy == "Jacobi(window=3, drafts='auto')"
    assert 0 <= stats.forward_seconds <= stats.seconds


def test_passes_of_a_draft_model_are_counted() -> None:
    target, drafter = ToyLanguage(3), ToyLanguage(3)
    made = sample(Speculative(4, drafter), target, [[1, 2]], 8)
    # The same model drafts: all drafts are kept, 4 tokens a pass; 3 drafts each and the prompt.
    assert made.stats.accepted == [0, 0, 0, 2]
    assert made.stats.draft_passes == drafter.passes == 7
    assert drafter.widths == [1, 1, 1, 1, 2, 1, 1]
    assert target.widths == [1, 4, 4]
