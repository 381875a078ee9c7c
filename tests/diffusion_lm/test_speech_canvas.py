"""Canvases of frames of Q codes: what a pass folds, the distribution, ragged batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import (
    ContinuousBatching,
    EntropyBounded,
    KLStable,
    LayeredParallel,
    LosslessUnmask,
    MaskedParallel,
    Noise,
    SamplingParams,
    Stepwise,
)
from mmaccel.contracts import CanvasPass, Prompt
from mmaccel.errors import ShapeError
from mmaccel.evaluation.exactness.g_test import count_sequences, g_test, power
from mmaccel.pipelines.hosts.diffusion_lm.speech_canvas import SpeechCanvas
from mmaccel.results import Generation
from mmaccel.tokenizers_vq.frames import CodeFrames
from tests.fixtures.joints import families
from tests.fixtures.masked_speech import JointHeads, canvas, joint_canvas
from tests.fixtures.toy_models import make_prompt

BOOKS, SIZE = 3, 7
TEXTS, FRAMES = [[4, 5, 6, 8], [9], [2, 3, 30]], [3, 5, 1]
POLICIES = [
    Stepwise(),
    LosslessUnmask(4),
    MaskedParallel(4),
    EntropyBounded(2.0),
    KLStable(0.3, 0.5),
    LayeredParallel(5),
]
Patch = pytest.MonkeyPatch


def decode(policy: Any, rows: list[int], batching: Any = None) -> Generation:
    model = canvas(BOOKS, SIZE)
    prompts = [model.to_canvas(TEXTS[k]) for k in rows] + [[model.nothing]] * len(rows)
    prompt = replace(
        make_prompt(prompts, 2),
        slots=torch.tensor([BOOKS * FRAMES[k] for k in rows]),
        layout=CodeFrames(BOOKS),
        batching=batching,
    )
    made: Generation = policy.sample(
        model,
        prompt,
        BOOKS * max(FRAMES[k] for k in rows),
        params=SamplingParams(guidance_scale=2.5),
        noise=Noise.from_seed([60 + k for k in rows], len(rows)),
    )
    return made


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_row_of_a_ragged_batch_is_the_row_alone(policy: Any) -> None:
    together, queued = decode(policy, [0, 1, 2]), decode(policy, [2, 1, 0], ContinuousBatching(2))
    assert together.lengths.tolist() == [BOOKS * n for n in FRAMES]
    for k in range(3):
        alone = decode(policy, [k])
        for made, row in ((together, k), (queued, 2 - k)):
            assert made.tokens[row, : BOOKS * FRAMES[k]].tolist() == alone.tokens[0].tolist()
            assert made.passes[row] == alone.passes[0]
        assert int(alone.tokens.max()) < SIZE - 1  # no mask is left


@pytest.mark.parametrize("slots", [[7, 12], [0, 1, 2]])
def test_slots_that_fit_no_rows_are_refused(slots: list[int]) -> None:
    with pytest.raises(ShapeError, match=r"prompt slots: expected \[3\] of 1 and more"):
        replace(make_prompt(TEXTS), slots=torch.tensor(slots))


def pass_of(model: SpeechCanvas, text: list[int], codes: list[int], n_seen: int) -> Tensor:
    """Logits `[L, V]` of one row whose last slots, after `n_seen`, are left out."""
    tokens = torch.tensor([text + codes])
    index = torch.arange(tokens.shape[1])[None]
    reads = (index < len(text) + n_seen)[:, None]
    queries = index[:, len(text) :]
    return model.forward(
        CanvasPass(
            tokens=tokens, positions=index, cache_indices=index, reads=reads, queries=queries
        )
    )[0]


def test_a_frame_is_one_position_that_sees_both_ways() -> None:
    model = canvas(BOOKS, SIZE)
    text, codes = model.to_canvas([4, 5]), [0, 1, 2, 3, 4, 5, 6, 6, 6]
    network = model.model
    frames = torch.tensor(codes).view(1, 3, BOOKS)
    sums = network.audio_embeddings.weight.view(BOOKS, SIZE, -1)  # by book, as published: q V + id
    by_hand = torch.stack([sum(sums[q, frames[0, t, q]] for q in range(BOOKS)) for t in range(3)])
    embedded = network.embed(torch.tensor([[4, 5]]), frames)
    assert torch.allclose(embedded[0, 2:], by_hand)
    hidden = network.llm(
        inputs_embeds=embedded,
        attention_mask=torch.zeros(1, 1, 5, 5, dtype=torch.float64),
        use_cache=False,
    ).last_hidden_state[0, 2:]
    heads = network.audio_heads.weight.view(BOOKS, SIZE, -1)
    expected = torch.stack([heads[q] @ hidden[t] for t in range(3) for q in range(BOOKS)])
    found = pass_of(model, text, codes, 9)
    assert torch.allclose(found, expected)
    last = pass_of(model, text, [*codes[:-1], 0], 9)
    assert not torch.allclose(last[0], found[0])  # the first frame sees the last one


def test_nothing_and_frames_that_a_row_has_not_are_not_there() -> None:
    model = canvas(BOOKS, SIZE)
    codes = [0, 1, 2, 3, 4, 5, 6, 6, 6]
    short = pass_of(model, [model.nothing], codes[:6], 6)
    assert torch.allclose(short, pass_of(model, [model.nothing] * 3, codes, 6)[:6])
    alone = model.model.states(
        torch.zeros(1, 0, dtype=torch.int64), torch.tensor(codes[:6]).view(1, 2, 3),
        torch.ones(1, 2, dtype=torch.bool),
    )  # fmt: skip
    assert torch.allclose(short, model.model.logits(alone)[0].flatten(0, 1))


def test_texts_stand_before_the_frames_or_beside_them() -> None:
    network = canvas(BOOKS, SIZE).model
    there = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    before = [[0, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 5, 5]]
    assert network.positions(there, 4).tolist() == before
    network.spreads_text = True
    # 3 tokens over 4 frames, 1.33 each; 4 tokens over 2 frames
    beside = [[1 / 6, 1.5, 17 / 6, 0, 1, 2, 3], [-0.25, 0.25, 0.75, 1.25, 0, 1]]
    found = network.positions(there, 4)
    assert found[there].tolist() == pytest.approx(sum(beside, []))


def p_value(policy: Any, n: int = 6000) -> float:
    """Of a G-test of frames of two codes against the joint that two heads know; a deviation of 0.08
    in total variation is rejected at 1e-4 with probability 0.99.
    """
    joint = families(4, 3)["markov"]
    model = joint_canvas(joint, 2)
    nothing = torch.full((n, 1), model.nothing)  # type: ignore[attr-defined]
    prompt = Prompt(nothing, torch.ones(n, dtype=torch.int64), layout=CodeFrames(2))
    made = policy.sample(
        model, prompt, 4, params=SamplingParams(temperature=1.0), noise=Noise.from_seed(1, n)
    )
    test = g_test(count_sequences(made.tokens, 3), joint.flatten())
    assert power(0.08, n, test.degrees, 1e-4) >= 0.99
    return test.p_value


@pytest.mark.parametrize(
    "policy", [Stepwise(), LosslessUnmask(3), Stepwise("left"), EntropyBounded(0.0)]
)
def test_one_code_a_pass_has_the_distribution_of_the_heads(policy: Any) -> None:
    assert p_value(policy) > 1e-4


@pytest.mark.parametrize(
    "bug", [lambda logits: logits.roll(1, 2), lambda logits: logits.transpose(1, 2).contiguous()],
    ids=["a head one book off", "slots book by book"],
)  # fmt: skip
def test_a_planted_bug_is_rejected(bug: Any, monkeypatch: Patch) -> None:
    own = JointHeads.logits
    monkeypatch.setattr(JointHeads, "logits", lambda self, states: bug(own(self, states)))
    assert p_value(Stepwise()) < 1e-4
