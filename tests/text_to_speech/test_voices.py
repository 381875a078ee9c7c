"""`voices`: prompts of phonemes, codes and sound, and what is refused before any pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import Autoregressive, Jacobi, SpeculativeJacobi, TextToSpeech
from mmaccel.cli import main
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.models.voices import VoicesSpeech
from mmaccel.pipelines.models.voices_vocabulary import split_text
from mmaccel.tokenizers_vq.speech_codec import SpeechCodec, SpeechCodecConfig, save_codec
from tests.fixtures.voices import SPEAKERS, TINY_CODEC, build_codec

TEXTS = ["a red fox", "blue cat", "seven"]
SECONDS = 0.3


def test_a_prompt_is_speaker_phonemes_and_a_start(voices: TextToSpeech) -> None:
    speech: Any = voices.speech
    assert isinstance(speech, VoicesSpeech) and speech.voices == SPEAKERS
    assert speech.params.temperature == 1.0
    names = speech.tokenizer.convert_ids_to_tokens(speech.encode("Red, fox!", "ben"))
    said = ["p:r", "p:'", "p:E", "p:d", "<|gap|>", "p:f", "p:'", "p:A:", "p:k", "p:s"]
    assert names == ["<|ben|>", *said, "<|say|>"]
    assert speech.encode("7", None) == speech.encode("seven", "ada")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A red-fox; 42 cats.", ["a", "red", "fox", "four", "two", "cats"]),
        ("don't  héllo ... !", ["dont", "héllo"]),
    ],
)
def test_words_of_a_text(text: str, words: list[str]) -> None:
    assert split_text(text) == words


def test_bitwise_windows_say_what_the_plain_loop_says(voices: TextToSpeech) -> None:
    options: dict[str, Any] = dict(seed=[3, 4, 5], max_seconds=SECONDS)
    plain = voices(TEXTS, policy=Autoregressive(), **options)
    ends = [made.is_finished for made in plain.utterances]
    assert any(ends) and not all(ends)
    for window in (4, 9):
        fast = voices(TEXTS, policy=Jacobi(window=window), **options)
        for one, other in zip(plain.utterances, fast.utterances, strict=True):
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.waveform, other.waveform)
    drawn = voices(TEXTS, policy=SpeculativeJacobi(window=8), **options)
    assert drawn.stats.exactness == "distribution"


def test_sound_is_the_codecs(voices: TextToSpeech) -> None:
    (made,) = voices("blue cat", seed=[3], max_seconds=SECONDS).utterances
    sound = build_codec().decode(made.tokens[None])[0].clamp(-1, 1)
    assert torch.allclose(made.waveform, sound, atol=1e-6)
    assert len(sound) == 320 * len(made.tokens) and made.sample_rate == 16_000
    assert int(made.tokens.max()) < 8


def test_a_long_text_is_spoken_in_parts(voices: TextToSpeech) -> None:
    """Sentences, and parts of long ones, each by itself; one utterance in the end."""
    speech: Any = voices.speech
    long = "A red fox. Blue cat, a red fox a blue cat; seven"
    parts = ["a red fox", "blue cat a red", "fox a blue cat", "seven"]
    assert speech.split(long) == parts and speech.split("a Fox!") == ["a Fox!"]
    assert speech.split("...A red fox. Blue cat, a red fox a blue cat; seven...!") == parts
    ended: list[int] = []
    options: dict[str, Any] = dict(max_seconds=SECONDS, policy=Jacobi(window=5))
    speech_of_both = voices(
        [long, "blue cat"], seed=[3, 4], deliver=lambda made: ended.append(made.index), **options
    )
    whole, short = speech_of_both.utterances
    alone = [voices(part, seed=[3], **options)[0] for part in parts]
    assert torch.equal(whole.tokens, torch.cat([one.tokens for one in alone]))
    assert torch.equal(whole.waveform, torch.cat([one.waveform for one in alone]))
    assert whole.text == long and whole.seed == 3 and (whole.index, short.index) == (0, 1)
    assert whole.is_finished == all(one.is_finished for one in alone)
    assert whole.passes == sum(one.passes for one in alone)
    assert torch.equal(short.waveform, voices("blue cat", seed=[4], **options)[0].waveform)
    assert sorted(ended) == [0, 1]


def test_methods_of_caches_are_refused_for_a_text_in_parts(voices: TextToSpeech) -> None:
    with pytest.raises(OptionError, match="kv_cache: expected a text .* one of 6 parts"):
        voices.stream("red. " * 6, kv_cache="snapkv")


def test_a_codec_of_another_rate_is_refused(folder: Path, tmp_path: Path) -> None:
    """Its sound would be too fast, and as long as before."""
    config = SpeechCodecConfig(**TINY_CODEC | {"sample_rate": 24_000})
    save_codec(SpeechCodec(config), tmp_path / "codec", torch.float32)
    words = "codec: expected 16000 Hz .* received 24000 Hz"
    with pytest.raises(UnsupportedModelError, match=words):
        TextToSpeech.from_pretrained(folder, codec=tmp_path / "codec")


def test_speakers_differ(voices: TextToSpeech) -> None:
    options: dict[str, Any] = dict(seed=[3], max_seconds=SECONDS)
    ada, ben = (voices("a red fox", voice=voice, **options) for voice in SPEAKERS)
    default = voices("a red fox", **options)
    assert not torch.equal(ada[0].tokens, ben[0].tokens)
    assert torch.equal(ada[0].tokens, default[0].tokens)


def test_the_command_writes_each_text(folder: Path, tmp_path: Path, capsys: Any) -> None:
    said = ["speak", "a red fox", "Blue cat!", "--model", folder, "--out", tmp_path / "out"]
    assert main([str(word) for word in [*said, "--voice", "ben", "--seed", 3]]) == 0
    files = sorted((tmp_path / "out").glob("*.wav"))
    facts = [json.loads(file.with_suffix(".json").read_text(encoding="utf-8")) for file in files]
    assert [each["text"] for each in facts] == ["a red fox", "Blue cat!"]
    assert {each["voice"] for each in facts} == {"ben"}
    capsys.readouterr()
    assert main([str(word) for word in [*said, "a red dog"]]) == 2
    complaint = capsys.readouterr().err.strip()
    assert "'dog'" in complaint and len(complaint.splitlines()) == 1
