"""AcousticGroups on models that speak: which tokens are codes, whose vectors count, and batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import AcousticGroups, Frames, GroupedSpeculative, OptionError, TextToSpeech
from mmaccel.pipelines.hosts.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.text_to_speech.plan import make_plan
from mmaccel.samplers.window.token_groups import TokenGroups
from tests.fixtures.tiny_lms import EOS, PROMPTS, VOCAB, build_lm

TEXTS = ["a red fox", "blue cat", "seven"]
SECONDS = 0.5
FRAMES = Frames(((4, 12), (12, 24)), VOCAB, ends=(EOS,))
WIDE = AcousticGroups(6, radius=0.9)


def members_of(groups: TokenGroups) -> list[list[int]]:
    return [sorted(part.tolist()) for part in groups.members.tensor_split(groups.first_member[1:])]


def test_codes_of_voices_are_those_of_its_codec(voices: TextToSpeech) -> None:
    """Three levels of -1 and 0: a code's neighbours differ from it in one of them."""
    speech: Any = voices.speech
    codes = speech.window.codes
    assert torch.equal(codes[:8], speech.codec.flat.decode(torch.arange(8)))
    assert len(codes) == speech.window.vocab_size > 8 and codes[8:].isnan().all()
    plan = make_plan(speech, TEXTS, 0)
    found = members_of(AcousticGroups(4, 1.1, "codes").find_groups(speech.window, plan.prompt))
    assert found[:8] == [sorted({k, k ^ 1, k ^ 2, k ^ 4}) for k in range(8)]
    assert found[8:] == [[k] for k in range(8, len(codes))]


def test_phonemes_and_the_end_stay_alone_among_embeddings(voices: TextToSpeech) -> None:
    window = voices.speech.window
    prompt = make_plan(voices.speech, TEXTS, 0).prompt
    found = members_of(AcousticGroups(4, 3.0).find_groups(window, prompt))
    assert found == [[*range(8)]] * 8 + [[k] for k in range(8, window.vocab_size)]


def test_an_utterance_is_the_same_in_every_batch(voices: TextToSpeech) -> None:
    policy = AcousticGroups(6, 1.1, "codes")
    options: dict[str, Any] = {"policy": policy, "max_seconds": SECONDS, "top_p": 0.8}
    together = voices(TEXTS, seed=[4, 5, 6], batch_size=2, **options)
    for text, seed, made in zip(TEXTS, (4, 5, 6), together.utterances, strict=True):
        (alone,) = voices(text, seed=[seed], **options).utterances
        assert torch.equal(alone.tokens, made.tokens) and alone.passes == made.passes
        assert bool((made.tokens < 8).all())
    assert together.stats.exactness == "relaxed" and together.stats.total_variation > 0.1
    assert together.stats.row_passes < together.stats.tokens


def test_attached_it_spends_within_a_layout() -> None:
    model = build_lm("qwen2")
    made = []
    for policy in (WIDE, AcousticGroups(6, radius=0.0)):
        with mmaccel.attach(model, policy, seed=5, strict=True, layout=FRAMES) as handle:
            options = {"max_new_tokens": 16, "do_sample": True, "top_k": 8, "temperature": 1.2}
            made.append(model.generate(**PROMPTS, **options))
        assert (handle.stats.total_variation > 0.1) is (policy is WIDE)
    assert not torch.equal(*made)
    new = made[0][:, PROMPTS["input_ids"].shape[1] :]
    allowed = FRAMES.allowed(torch.arange(new.shape[1])[None].expand_as(new))
    assert allowed is not None
    is_code = allowed.gather(-1, new[..., None])[..., 0]
    assert bool((is_code | (new == 0)).all())  # or padding behind an end


def test_a_part_of_a_vocabulary_has_its_own_embeddings() -> None:
    model = build_lm("llama")
    window = ImageTokenWindow(model, range(10, 26), (6,))
    found = window.vectors("embeddings")
    assert found is not None
    assert torch.equal(found, model.get_input_embeddings().weight[[*range(10, 26), 6]])


def test_codes_for_some_tokens_do_not_serve_groups_of_all(voices: TextToSpeech) -> None:
    policy = GroupedSpeculative(4, groups="latent")
    with pytest.raises(OptionError, match="expected a model with a code .*choose 'ranks'"):
        voices(TEXTS, policy=policy, max_seconds=SECONDS)
