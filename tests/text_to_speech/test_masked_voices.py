"""Speech from a canvas: lengths, batches, streams and servers, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmaccel import KLStable, LosslessUnmask, MaskedParallel, TextToSpeech
from mmaccel.cli import main
from mmaccel.errors import OptionError
from mmaccel.pipelines.text_to_speech.types import SpeechRequest, Utterance
from mmaccel.samplers.sampling_params import SamplingParams
from tests.fixtures.masked_speech import build_masked_voices
from tests.fixtures.voices import LEXICON, build_codec

TEXTS = ["a red fox", "cat", "seven blue"]
BOOKS, FRAME = 3, 640  # codes, samples of 40 ms


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_masked_voices(tmp_path_factory.mktemp("masked"))


@pytest.fixture(scope="module")
def masked(folder: Path) -> TextToSpeech:
    return TextToSpeech.from_pretrained(folder)


def frames_of(text: str) -> int:
    return 2 * sum(len(LEXICON[word]) for word in text.split())


def test_each_text_has_its_own_length_and_sounds_as_alone(masked: TextToSpeech) -> None:
    together = masked(TEXTS, policy=KLStable(0.2, 1.0), seed=[3, 4, 5])
    for k, made in enumerate(together.utterances):
        (alone,) = masked(TEXTS[k], policy=KLStable(0.2, 1.0), seed=[3 + k]).utterances
        assert torch.equal(made.tokens, alone.tokens)
        assert torch.equal(made.waveform, alone.waveform)
        assert made.tokens.shape == (BOOKS * frames_of(TEXTS[k]),) and made.is_finished
        assert made.waveform.shape == (FRAME * frames_of(TEXTS[k]),)


def test_the_sound_is_the_codecs(masked: TextToSpeech) -> None:
    (made,) = masked("cat", policy=MaskedParallel(4), seed=[1]).utterances
    codes = made.tokens.view(1, -1, BOOKS)
    assert int(codes.max()) < build_codec().book_size
    assert torch.equal(made.waveform, build_codec().decode_stacked(codes)[0].clamp(-1, 1))


def test_a_stream_sends_chunks_when_the_text_is_filled(masked: TextToSpeech) -> None:
    text = "seven fox"
    (whole,) = masked(text, policy=MaskedParallel(8), seed=[6]).utterances
    stream = masked.stream(text, policy=MaskedParallel(8), seed=6, chunk_seconds=0.2)
    chunks = list(stream)
    assert len(chunks) > 2 and {chunk.passes for chunk in chunks} == {8}
    assert stream.utterance is not None and torch.equal(stream.utterance.tokens, whole.tokens)
    assert sum(len(chunk.waveform) for chunk in chunks) == len(whole.waveform)


def test_requests_join_canvases_of_their_own_lengths(
    masked: TextToSpeech, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = masked(TEXTS, policy=LosslessUnmask(2), seed=[3, 4, 5])
    monkeypatch.setattr(masked.speech, "params", SamplingParams(guidance_scale=3.0), raising=False)
    alone = masked(TEXTS, policy=LosslessUnmask(2), seed=[3, 4, 5])
    requests = [SpeechRequest(text, 3 + k, tag=k) for k, text in enumerate(TEXTS)]
    made: dict[int, Utterance] = {}
    masked.serve(
        requests[:2], rows=2, max_seconds=2.0, policy=LosslessUnmask(2), prompt_width=20,
        deliver=lambda request, spoken: made.update({request.tag: spoken}),
        arrivals=lambda most: [requests.pop(2) for _ in range(min(most, len(requests) - 2))],
    )  # fmt: skip
    for k in range(3):
        assert torch.equal(made[k].tokens, alone[k].tokens) and made[k].is_finished
        assert not torch.equal(made[k].tokens, plain[k].tokens)  # guidance counts


def test_a_text_that_does_not_fit_is_refused_before_any_pass(
    masked: TextToSpeech, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(masked.model), "forward", None)
    with pytest.raises(OptionError, match=r"max_seconds: expected .* 0.4 s, .* lasts 0.8 s"):
        masked("a red fox", max_seconds=0.4)
    with pytest.raises(OptionError, match=r"repetition_penalty: expected 1, .* received 1.2;"):
        masked("a red fox", repetition_penalty=1.2)
    monkeypatch.setattr(masked.model, "n_positions", 20)
    with pytest.raises(OptionError, match=r"positions: expected at most 20 .* 14 .* 20 of the fra"):
        masked("a red fox")


def test_the_command_takes_policies_of_canvases_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["speak", "a red fox", "--model", str(folder), "--out", str(tmp_path)]
    main([*command, "--policy", "layered-parallel", "--set", "steps=3"])
    assert "60 tokens in 3 forward passes" in capsys.readouterr().out
    main([*command, "--policy", "jacobi"])
    assert "'jacobi', which decodes a window, not a canvas" in capsys.readouterr().err
