"""`/v1/audio/speech`: the sound of `mmaccel speak`, alone and in company."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmaccel import TextToSpeech
from mmaccel.outputs.sound_files import to_wav
from mmaccel.serving.jobs import Ticket
from mmaccel.serving.speech import SpeechBackend
from tests.fixtures.speech import FAMILIES, SECONDS, TEXTS
from tests.serving.conftest import run_server
from tests.serving.running import Running, assert_error, later

SPEECH = "/v1/audio/speech"
Folders = dict[str, tuple[Path, Path]]
Say = Callable[..., Any]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: Any, speech_folders: Folders) -> Iterator[tuple[Running, TextToSpeech]]:
    """A server of a family's tiny model, and the model once more, which no server runs."""
    model, codec = speech_folders[request.param]
    seconds = SECONDS[request.param]
    backend = SpeechBackend(str(model), codec=str(codec), max_seconds=seconds)
    backend.warm_up()
    with run_server(speech=backend) as running:
        yield running, TextToSpeech.from_pretrained(str(model), codec=str(codec), device="cpu")


@pytest.fixture
def say(served: tuple[Running, TextToSpeech]) -> Say:
    """Ask for speech."""
    return lambda text=TEXTS[0], **fields: served[0].http.post(
        SPEECH, json={"input": text, **fields}
    )


def test_shapes(served: tuple[Running, TextToSpeech], say: Say) -> None:
    client = served[0].openai().audio.speech
    asked: dict[str, Any] = {"model": "tiny", "voice": "default", "input": TEXTS[0]}
    made = client.create(**asked, extra_body={"seed": 3})
    with wave.open(io.BytesIO(made.content)) as sound:
        assert (sound.getnchannels(), sound.getsampwidth()) == (1, 2)
        rate, samples = sound.getframerate(), sound.readframes(sound.getnframes())
    assert rate == served[1].speech.sample_rate and samples
    raw = say(seed=3, response_format="pcm")
    assert raw.content == samples and raw.headers["x-sample-rate"] == str(rate)
    with client.with_streaming_response.create(**asked, extra_body={"seed": 3}) as streamed:
        assert b"".join(streamed.iter_bytes()) == made.content
    free = say()
    assert say(seed=int(free.headers["x-seed"])).content == free.content


def test_alone_in_company_and_at_the_command_line(
    served: tuple[Running, TextToSpeech], say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, pipe = served
    clients = []
    put = Ticket.put
    monkeypatch.setattr(
        Ticket, "put", lambda self, event: (clients.append(self.client), put(self, event))
    )
    seconds = 0.05 if pipe.speech.sample_rate == 16000 else 0.008
    asked = [(TEXTS[k % 3], 60 + k) for k in range(4)]
    alone = [say(text, seed=seed).content for text, seed in asked]
    with running.gate(is_closed=True) as gate:
        together = []
        for k, (text, seed) in enumerate(asked):
            together.append(later(lambda text=text, seed=seed: say(text, seed=seed)))  # type: ignore[misc]
            gate.wait_for(1)
            running.wait_for(k)
        gate.open()
        assert [each.result().content for each in together] == alone
        assert max(gate.rows) > 1
    assert clients == ["127.0.0.1"] * 8
    for (text, seed), sound in zip(asked, alone):
        (made,) = pipe(text, seed=[seed], max_seconds=seconds).utterances
        assert sound == to_wav(made.waveform, made.sample_rate)


WRONG: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"text": ""}, "input", "missing_field"),
    ({"text": "a\x00"}, "input", "invalid_value"),
    ({"text": "a" * 4001}, "input", "string_too_long"),
    ({"text": "a " * 1500}, "input", "invalid_value"),  # more than the model has positions for
    ({"voice": "nobody:"}, "voice", "invalid_value"),
    ({"response_format": "mp3"}, "response_format", "invalid_value"),
    ({"speed": 2.0}, "speed", "invalid_value"),
    ({"instructions": "whisper"}, "instructions", "unknown_parameter"),
)


@pytest.mark.parametrize(("fields", "param", "code"), WRONG, ids=range(len(WRONG)))
def test_wrong_fields(say: Say, fields: dict[str, Any], param: str, code: str) -> None:
    assert_error(say(**fields), 400, param, code)


def test_a_speech_model_draws_nothing(served: tuple[Running, TextToSpeech]) -> None:
    answer = served[0].http.post("/v1/images/generations", json={"prompt": "a"})
    message = assert_error(answer, 404, None, "unknown_url")
    listed = message.partition("; ")[2]
    assert SPEECH in listed and "/v1/models" in listed and "/v1/images" not in listed
