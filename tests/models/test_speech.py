"""Llasa and Orpheus from their files: prompts, voices, codecs, and checkpoints that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import TextToSpeech
from mmaccel.pipelines.models import token_names as speech_parts
from mmaccel.pipelines.text_to_speech.streaming import check_sound
from tests.fixtures.shared import media_folders, media_pipe
from tests.fixtures.speech import FAMILIES, FIRST, SECONDS, SNAC_CODES, TEXTS

SEEDS = [3, 4, 5]
PROMPTS = {
    # start, two unknown words for the role; "Convert the text to speech:"
    "llasa": [4, 2, 2, 44, 2, 2, 2, 2, 5, 40, 41, 42, 6, 3, 4, 2, 7],
    "orpheus": [17, 2, 2, 52, 53, 54, 3, 18, 19, 15],
}
_LLAMA = (  # Llama's template for the date, with words of the fixture instead of dates
    "{% if not date_string is defined %}{% set date_string = strftime_now('%A') %}{% endif %}"
    "{{ 'red' if date_string == '26 Jul 2024' else 'blue' }} "
)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_prompts_are_the_authors(family: str) -> None:
    pipe = media_pipe(family)
    assert pipe.speech.encode(" a red fox ", None) == PROMPTS[family]
    if family == "orpheus":
        assert pipe.speech.encode("a red fox", "snow") == [17, 57, *PROMPTS[family][2:]]


def test_voices() -> None:
    assert media_pipe("llasa").speech.voices == ()
    pipe = media_pipe("orpheus")
    assert pipe.speech.voices[0] == "tara"
    options: dict[str, Any] = dict(seed=[3], max_seconds=SECONDS["orpheus"])
    usual, named = pipe("a red fox", **options), pipe("a red fox", voice="snow", **options)
    assert usual[0].voice is None and named[0].voice == "snow"
    assert usual[0].tokens.tolist() != named[0].tokens.tolist()


def test_the_prompt_does_not_change_with_the_day(tmp_path: Path) -> None:
    source, codec = media_folders("llasa")
    folder = shutil.copytree(source, tmp_path / "llasa")
    file = folder / "chat_template.jinja"
    file.write_text(_LLAMA + file.read_text(encoding="utf-8"), encoding="utf-8")
    speech: Any = TextToSpeech.from_pretrained(folder, codec=codec).speech
    plain = media_pipe("llasa").speech
    (red,) = speech.tokenizer("red")["input_ids"]
    assert speech.encode("the fox", None) == [red, *plain.encode("the fox", None)]


def test_llasas_sound_is_the_codecs() -> None:
    from transformers import Xcodec2Model

    whole = Xcodec2Model.from_pretrained(media_folders("llasa")[1]).eval()
    (made,) = media_pipe("llasa")(TEXTS[0], seed=3, max_seconds=SECONDS["llasa"]).utterances
    codes = made.tokens - FIRST
    with torch.no_grad():
        sound = whole.decode(codes[None, None]).audio_values[0, 0]
    assert torch.equal(made.waveform, sound.clamp(-1, 1)) and made.sample_rate == 16000
    assert len(sound) == 20 * len(codes)


def test_orpheus_sound_is_the_codecs_and_its_noise_is_the_seeds() -> None:
    from snac import SNAC

    pipe, codec = media_pipe("orpheus"), media_folders("orpheus")[1]
    before = torch.get_rng_state()
    made = pipe(TEXTS, seed=SEEDS, max_seconds=SECONDS["orpheus"])
    assert torch.equal(torch.get_rng_state(), before)
    whole, utterance = SNAC.from_pretrained(str(codec)), made[2]
    coarse, middle, fine = [], [], []
    ids = utterance.tokens.tolist()
    for k in range(0, len(ids), 7):
        own = [ids[k + s] - FIRST - s * SNAC_CODES for s in range(7)]
        coarse.append(own[0])
        middle += [own[1], own[4]]
        fine += [own[2], own[3], own[5], own[6]]
    torch.manual_seed(SEEDS[2])
    with torch.no_grad():
        sound = whole.decode([torch.tensor([codes]) for codes in (coarse, middle, fine)])
    assert torch.equal(utterance.waveform, sound.flatten().clamp(-1, 1))
    assert utterance.sample_rate == 24000 and len(sound.flatten()) == 32 * len(coarse)
    other = pipe.speech.render(utterance.tokens, 9)
    assert not torch.equal(other, utterance.waveform)


def test_the_codec_keeps_its_precision_and_its_bounds(family: str) -> None:
    model, codec = media_folders(family)
    speech: Any = TextToSpeech.from_pretrained(model, codec=codec, dtype=torch.bfloat16).speech
    assert speech.window.model.dtype == torch.bfloat16
    assert {value.dtype for value in speech.codec.parameters()} == {torch.float32}
    plain = speech.codec.decode

    def louder(codes: Any) -> Any:
        made = plain(codes)
        (made if family == "orpheus" else made.audio_values)[...] = 1.5
        return made

    speech.codec.decode = louder
    tokens = torch.arange(24, 52, 4) if family == "orpheus" else torch.arange(24, 31)
    sound = check_sound(speech.render(tokens, 0), 0)
    assert sound.dtype == torch.float32 and sound.unique().tolist() == [1.0]


def test_the_codecs_encoders_are_removed() -> None:
    names = {name.split(".")[0] for name, _ in media_pipe("llasa").speech.codec.named_parameters()}
    assert names == {"acoustic_decoder", "quantizer"} or names == {"acoustic_decoder"}


def test_a_model_is_self_checked_when_it_is_loaded(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, codec = media_folders(family)
    checked: list[tuple[Any, Any]] = []
    monkeypatch.setattr(speech_parts, "check_windows", lambda *both: checked.append(both))
    speech: Any = TextToSpeech.from_pretrained(model, codec=codec).speech
    assert checked == [(speech.window.model, speech.window)]
