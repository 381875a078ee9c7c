"""MusicGen under window policies: through its own `generate`, codes are those of the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import AttachError, UnsupportedModelError
from mmaccel.evaluation.exactness.g_test import count_sequences, g_test
from mmaccel.pipelines.delay import musicgen
from mmaccel.pipelines.delay.family import CodeDecoder
from mmaccel.pipelines.delay.musicgen import MusicgenSteps
from tests.delay.models import BOOKS, CODES, MASK, TEXT, keep_codes, make_musicgen

POLICIES = [
    mmaccel.Autoregressive(),
    mmaccel.Jacobi(window=2),
    mmaccel.Jacobi(window=BOOKS),
    mmaccel.Jacobi(window=11, drafts="previous-frame"),
]
EXACT = [mmaccel.SpeculativeJacobi(window=8), mmaccel.Speculative(window=4, drafts="ngram")]
KINDS: dict[str, Callable[[], Any]] = {
    "float64": lambda: make_musicgen().double(),
    "stereo": lambda: make_musicgen(channels=2),
    "melody": lambda: make_musicgen(melody=True),
}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "guided": {"guidance_scale": 3.0},
    "begun": {"decoder_input_ids": torch.arange(3 * BOOKS * 3).view(-1, 3) % CODES},
    "too short for the pattern": {"max_length": 2},
}


class Music:
    """A model and the codes that its codec is given."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._found = keep_codes(model)

    def call(self, **options: Any) -> Tensor:
        given = {"input_ids": TEXT, "attention_mask": MASK, "max_length": 9}
        self.model.generate(**given | options)
        made = torch.cat([codes[0] for codes in self._found], 1)  # both channels
        self._found.clear()
        return made

    def attached(self, policy: Any, seed: Any = 3, **options: Any) -> tuple[Tensor, mmaccel.Stats]:
        with mmaccel.attach(self.model, policy, seed=seed, strict=True) as handle:
            made = self.call(**options)
        assert handle.stats is not None and not handle.stats.fallbacks
        return made, handle.stats


@pytest.fixture(scope="module", params=KINDS)
def music(request: pytest.FixtureRequest) -> Music:
    return Music(KINDS[request.param]())


@pytest.fixture(scope="module")
def plain() -> Music:
    return Music(make_musicgen())


def compare(music: Music, policies: list[Any], options: dict[str, Any]) -> None:
    """Greedy codes are those of the model's own loop."""
    own = music.call(**options)
    for policy in policies:
        assert torch.equal(music.attached(policy, **options)[0], own)
    assert torch.equal(music.call(**options), own)  # detached


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
def test_greedy_codes_are_those_of_the_models_own_loop(plain: Music, options: Any) -> None:
    compare(plain, [*POLICIES[2:], *EXACT], options)


@pytest.mark.parametrize("name", ["guided", "begun"])
def test_greedy_codes_of_other_models(music: Music, name: str) -> None:
    compare(music, [POLICIES[3], EXACT[0]], CALLS[name])


def test_sampled_codes_are_the_same_under_all_bitwise_policies(music: Music) -> None:
    options = {
        "guidance_scale": 3.0,
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 6,
        "top_p": 0.95,
    }
    own, stats = music.attached(POLICIES[0], **options)
    n_steps = 8
    channels = music.model.decoder.config.audio_channels
    delays = BOOKS // channels - 1
    assert own.shape[2] == n_steps - delays
    assert stats.tokens == own.numel() and stats.passes == own.numel() // len(own)
    for policy in POLICIES[1:]:
        made, cost = music.attached(policy, **options)
        assert torch.equal(made, own) and cost.passes < stats.passes
        if policy.window >= 2 * BOOKS - 1:
            assert cost.passes <= n_steps + 1
    other, _ = music.attached(POLICIES[0], seed=4, **options)
    assert not torch.equal(other, own)


def test_a_row_does_not_depend_on_the_batch(plain: Music) -> None:
    """Texts of different lengths, padded; each row has a seed of its own."""
    options = {"do_sample": True, "guidance_scale": 2.0}
    several, _ = plain.attached(POLICIES[3], seed=[5, 6, 7], **options)
    for row in range(3):
        own = {"input_ids": TEXT[row : row + 1], "attention_mask": MASK[row : row + 1]}
        alone, _ = plain.attached(POLICIES[3], seed=[5 + row], **options, **own)
        assert torch.equal(alone[0], several[row])


def test_calls_without_a_text(plain: Music) -> None:
    empty = plain.model.get_unconditional_inputs(2)
    given = {"encoder_outputs": empty.encoder_outputs, "guidance_scale": empty.guidance_scale}
    given |= {"input_ids": None, "attention_mask": empty.attention_mask}
    own = plain.call(**given)
    assert torch.equal(plain.attached(POLICIES[2], **given)[0], own)


def test_processors_of_single_codes_go_along(plain: Music) -> None:
    options = {"suppress_tokens": [12, 15], "typical_p": 0.9}
    own = plain.call(**options)
    made, _ = plain.attached(POLICIES[2], **options)
    assert torch.equal(made, own) and not torch.isin(made, torch.tensor([12, 15])).any()
    drawn, _ = plain.attached(POLICIES[0], do_sample=True, **options)
    assert torch.equal(plain.attached(POLICIES[2], do_sample=True, **options)[0], drawn)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "states": (
        {"return_dict_in_generate": True, "output_hidden_states": True},
        "output_hidden_states",
    ),
    "a penalty": ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor, which reads"),
    "a penalty before guidance": (
        {"repetition_penalty": 1.2, "guidance_scale": 3.0},
        "guidance after another processor",
    ),
    "an end": ({"eos_token_id": 3}, "an end token"),
    "a time limit": ({"max_time": 60.0}, "reads rows of single codebooks"),
    "a mask of the codes": (
        {"decoder_attention_mask": torch.ones(3, 1)},
        "decoder_attention_mask",
    ),
}


@pytest.mark.parametrize("options, says", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(plain: Music, options: Any, says: str) -> None:
    with mmaccel.attach(plain.model, "jacobi", strict=True):
        with pytest.raises(AttachError, match=says):
            plain.call(**options)


def test_refused_calls_run_the_models_own_loop(plain: Music) -> None:
    options = {"return_dict_in_generate": True, "output_scores": True}
    own = plain.call(**options)
    with mmaccel.attach(plain.model, "jacobi") as handle:
        with pytest.warns(UserWarning, match="output_scores"):
            assert torch.equal(plain.call(**options), own)
    assert handle.stats is not None and handle.stats.fallbacks == ["output_scores"]


def test_a_returned_object_has_the_codes(music: Music) -> None:
    own = music.call()
    assert torch.equal(music.attached("jacobi", return_dict_in_generate=True)[0], own)


def test_what_attach_refuses(plain: Music) -> None:
    with mmaccel.attach(plain.model, "jacobi", layout=mmaccel.Frames(((0, 8),), CODES)):
        with pytest.raises(AttachError, match="several codebooks a step"):
            plain.call()
    other = make_musicgen()
    other.decoder.config._attn_implementation = "flex_attention"
    found = mmaccel.supports(other)
    assert not found and "flex_attention" in found.reason
    with pytest.raises(UnsupportedModelError):
        mmaccel.attach(plain.model, "jacobi", kv_cache="snapkv")


def list_languages(model: Any) -> tuple[Tensor, Tensor]:
    """All 81 grids of two codebooks of three codes in two frames, `[81, 4]` slot by slot, and
    their probabilities, by the model's own pass over each.
    """
    slots = torch.cartesian_prod(*[torch.arange(3)] * 4)  # book 0, then 0 and 1, then 1
    grid = torch.full((len(slots), 2, 4), 3)
    step, book = torch.tensor([1, 2, 2, 3]), torch.tensor([0, 0, 1, 1])
    grid[:, book, step] = slots
    with torch.no_grad():
        states = model.text_encoder(TEXT[1:2]).last_hidden_state
        logits = model.decoder(
            input_ids=grid.flatten(0, 1),
            encoder_hidden_states=model.enc_to_dec_proj(states).expand(len(slots), -1, -1),
        ).logits.unflatten(0, (len(slots), 2))
    scored = logits[:, book, step - 1].double().softmax(-1)  # [81, 4, 3]
    return slots, scored.gather(2, slots[..., None])[..., 0].prod(1)


@pytest.mark.parametrize(
    "policy",
    [
        mmaccel.SpeculativeJacobi(window=3),
        mmaccel.SpeculativeJacobi(window=4, coupling="independent", drafts="previous-frame"),
        mmaccel.Speculative(window=3, drafts="ngram"),
    ],
    ids=repr,
)
def test_codes_have_the_models_distribution(policy: Any) -> None:
    music = Music(make_musicgen(2, 3, num_hidden_layers=1))
    rows = 4000
    text = {"input_ids": TEXT[1:2].expand(rows, -1), "attention_mask": MASK[1:2].expand(rows, -1)}
    made, _ = music.attached(policy, seed=11, do_sample=True, max_length=4, top_k=0, **text)
    _, expected = list_languages(music.model)
    slots = torch.stack([made[:, 0, 0], made[:, 0, 1], made[:, 1, 0], made[:, 1, 1]], 1)
    found = g_test(count_sequences(slots, 3), expected)
    assert found.degrees > 30 and found.p_value > 1e-3


def test_books_that_are_off_by_one_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = MusicgenSteps.forward

    def shifted(self: MusicgenSteps, codes: Tensor, first: Tensor) -> Tensor:
        return forward(self, codes.roll(1, 2), first)

    music = Music(make_musicgen())
    own = music.call()
    monkeypatch.setattr(MusicgenSteps, "forward", shifted)
    assert "agree with its own pass" in mmaccel.supports(music.model).reason
    monkeypatch.setattr(CodeDecoder, "_check_passes", lambda *_: None)
    assert not torch.equal(music.attached("jacobi")[0], own)


def test_a_pattern_that_is_applied_twice_is_seen(
    plain: Music, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = plain.call()
    find = musicgen.list_cells

    def twice(free: Tensor) -> Any:
        again = free.clone()
        for book in range(1, BOOKS):
            again[:, book] = False
            again[book:, book] = free[:-book, book]
        return find(again)

    monkeypatch.setattr(musicgen, "list_cells", twice)
    made, _ = plain.attached("jacobi")
    assert made.shape != own.shape or not torch.equal(made, own)


def test_branches_that_are_exchanged_are_seen(
    plain: Music, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"guidance_scale": 3.0}
    own = plain.call(**options)
    forward = MusicgenSteps.forward

    def exchanged(self: MusicgenSteps, codes: Tensor, first: Tensor) -> Tensor:
        return torch.cat(forward(self, codes, first).chunk(2)[::-1])

    monkeypatch.setattr(MusicgenSteps, "forward", exchanged)
    assert not torch.equal(plain.attached("jacobi", **options)[0], own)
