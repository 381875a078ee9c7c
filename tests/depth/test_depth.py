"""Depth windows: through the models' own `generate`, frames are those of the plain loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.contracts import Pass
from mmaccel.evaluation.exactness.g_test import count_sequences, g_test
from mmaccel.pipelines.hosts.attach import generate
from mmaccel.pipelines.hosts.depth.decoders import CsmDepth
from mmaccel.pipelines.hosts.depth.window import DepthWindow
from tests.depth.models import MODELS, Speech, fill

POLICIES = [
    mmaccel.Jacobi(window=3),
    mmaccel.Jacobi(window=8, drafts="previous-frame"),
    mmaccel.Jacobi(window="adaptive"),
]


@pytest.mark.parametrize("policy", [*POLICIES[1:], mmaccel.SpeculativeJacobi(window=8)], ids=repr)
def test_greedy_frames_are_those_of_the_models_own_loop(speech: Speech, policy: Any) -> None:
    plain = speech.call(False)
    with mmaccel.attach(speech.model, policy, strict=True) as handle:
        assert torch.equal(speech.call(False), plain)
    stats = handle.stats
    assert stats is not None and len(handle.history) == 1
    assert not stats.fallbacks and stats.tokens % speech.depth == 0
    assert any("calls of the decoder" in note for note in stats.notes)
    assert torch.equal(speech.call(False), plain)  # detached


def sample(speech: Speech, policy: Any, seed: int = 3) -> tuple[Tensor, mmaccel.Stats]:
    torch.manual_seed(1)
    with mmaccel.attach(speech.model, policy, seed=seed, strict=True) as handle:
        made = speech.call(True)
    assert handle.stats is not None
    return made, handle.stats


def test_sampled_frames_are_the_same_under_all_bitwise_policies(speech: Speech) -> None:
    plain, stats = sample(speech, mmaccel.Autoregressive())
    assert stats.passes * len(plain) == stats.tokens >= 4 * speech.depth * len(plain)
    for policy in POLICIES:
        made, cost = sample(speech, policy)
        assert torch.equal(made, plain)
        assert cost.passes < stats.passes or policy.window == "adaptive"  # which measures first
    other, _ = sample(speech, POLICIES[0], seed=4)
    assert not torch.equal(other, plain)


def make_frames(speech: Speech, policy: Any, **options: Any) -> tuple[Any, Any]:
    """The same frame twice, as if nothing was said in between."""
    frame = speech.frame(2) | options
    with mmaccel.attach(speech.decoder, policy, seed=5, strict=True) as handle:
        made = [speech.decoder.generate(**frame) for _ in range(2)]
    return made, handle.history


def test_a_frame_that_repeats_the_one_before_takes_one_pass(speech: Speech) -> None:
    policy = mmaccel.Jacobi(window=8, drafts="previous-frame")
    made, history = make_frames(speech, policy, do_sample=False)
    assert torch.equal(*made)
    assert history[0].passes > 1 and history[1].passes == 1


def test_frames_have_noise_of_their_own(speech: Speech, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = make_frames(speech, mmaccel.Jacobi(window=8), do_sample=True)
    assert not torch.equal(*made)
    monkeypatch.setattr(generate, "_STEP", 0)  # the bug
    made, _ = make_frames(speech, mmaccel.Jacobi(window=8), do_sample=True)
    assert torch.equal(*made)


def test_a_frame_inside_of_another_one_leaves_it_alone(speech: Speech) -> None:
    """As a hook or a criterion makes it while an utterance is decoded."""
    own = speech.call(False)
    calls: list[int] = []

    def inside(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 15:  # in a frame whose window is that of the first
            speech.decoder.generate(**speech.frame(len(own)), do_sample=False)

    is_moshi = speech.decoder.config.model_type == "moshi_depth"
    part = speech.decoder.layers[-1] if is_moshi else speech.decoder.model.norm
    with mmaccel.attach(speech.model, mmaccel.Jacobi(window=4), strict=True):
        hook = part.register_forward_hook(inside)
        try:
            assert torch.equal(speech.call(False), own) and len(calls) > 15
        finally:
            hook.remove()


def test_a_row_does_not_depend_on_the_batch(speech: Speech) -> None:
    policy = mmaccel.Jacobi(window=8, drafts="previous-frame")

    def make(seeds: list[int], frame: dict[str, Any]) -> list[Tensor]:
        with mmaccel.attach(speech.decoder, policy, seed=seeds, strict=True):
            made = [speech.decoder.generate(**frame, do_sample=True) for _ in range(2)]
        return [getattr(each, "sequences", each) for each in made]

    frame = speech.frame(3)
    several = make([5, 6, 7], frame)
    for row in range(3):
        own = {k: v[row : row + 1] if isinstance(v, Tensor) else v for k, v in frame.items()}
        for alone, batched in zip(make([5 + row], own), several):
            assert torch.equal(alone[0], batched[row])


def make_small() -> Any:
    from transformers.models.csm import CsmDepthDecoderConfig, CsmDepthDecoderForCausalLM

    config = CsmDepthDecoderConfig(
        num_codebooks=4, vocab_size=3, backbone_hidden_size=16, hidden_size=16,
        intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=5,
    )  # fmt: skip
    model = CsmDepthDecoderForCausalLM(config).eval()
    fill(model, 0.4)
    return model


ROWS = 6000
WALK = mmaccel.SpeculativeJacobi(window=3, coupling="maximal")


def draw_frames(model: Any, policy: Any) -> tuple[Tensor, Tensor]:
    """Codes `[ROWS, 3]` of a second frame, and the probability of each triple of codes."""
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(1, 16, generator=generator)
    frame = {
        "input_ids": torch.tensor([[0, 2]]).expand(ROWS, -1),
        "backbone_last_hidden_state": state.expand(ROWS, -1),
    }
    with mmaccel.attach(model, policy, seed=11, strict=True):
        for _ in range(2):
            made = model.generate(**frame, do_sample=True, max_new_tokens=3, top_k=0)
    triples = torch.cartesian_prod(*[torch.arange(3)] * 3)  # [27, 3]
    ids = torch.cat([torch.tensor([[0, 2]]).expand(27, -1), triples[:, :2]], 1)
    window = DepthWindow(CsmDepth(), model, state.expand(27, -1))
    window.reserve(*ids.shape)
    logits = window.forward(Pass(ids, ids.new_zeros(27)))
    chances = logits[:, 1:].double().softmax(-1).gather(2, triples[..., None])[..., 0]
    return made[:, 2:], chances.prod(1)


@pytest.mark.parametrize("drafts", ["previous-frame", "random"])
def test_frames_have_the_decoders_distribution(drafts: str) -> None:
    made, expected = draw_frames(make_small(), replace(WALK, drafts=drafts))
    found = g_test(count_sequences(made, 3), expected)
    assert found.degrees > 15 and found.p_value > 1e-3


def test_coins_that_frames_share_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "_STEP", 0)  # drafts are then what the noise prefers again
    made, expected = draw_frames(make_small(), replace(WALK, drafts="previous-frame"))
    assert g_test(count_sequences(made, 3), expected).p_value < 1e-6


def test_a_pass_that_is_off_by_one_book_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    score = CsmDepth.score

    def shifted(self: CsmDepth, model: Any, hidden: Tensor, first: int) -> Tensor:
        return score(self, model, hidden.roll(1, 1), first)

    speech = MODELS["csm"]()
    monkeypatch.setattr(CsmDepth, "score", shifted)
    assert "one whose windows give logits" in mmaccel.supports(speech.model).reason

    speech = MODELS["csm"]()
    plain = speech.call(False)
    own = CsmDepth.compared
    monkeypatch.setattr(CsmDepth, "compared", lambda *given: own(*given)[:1] * 2)
    with mmaccel.attach(speech.model, "jacobi", strict=True):
        assert not torch.equal(speech.call(False), plain)


def test_a_frame_that_goes_on_with_entries_of_the_one_before_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speech = MODELS["csm"]()
    plain = speech.call(False)
    reserve = DepthWindow.reserve

    def keep(self: DepthWindow, rows: int, positions: int) -> None:
        n_held = self._n_held
        reserve(self, rows, positions)
        self._n_held = n_held  # the bug

    monkeypatch.setattr(DepthWindow, "reserve", keep)
    with mmaccel.attach(speech.model, "jacobi", strict=True):
        assert not torch.equal(speech.call(False), plain)
