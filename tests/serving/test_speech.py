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
from mmaccel.serving.service import Service
from mmaccel.serving.settings import ServerSettings
from mmaccel.serving.speech import SpeechBackend
from tests.fixtures.speech import FAMILIES, SECONDS, TEXTS
from tests.serving.running import Gate, Later, Running, wait_until
from tests.serving.test_hostile import assert_error

SPEECH = "/v1/audio/speech"
Folders = dict[str, tuple[Path, Path]]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: Any, speech_folders: Folders) -> Iterator[tuple[Running, TextToSpeech]]:
    """A server of a family's tiny model, and the model."""
    model, codec = speech_folders[request.param]
    seconds = SECONDS[request.param]
    backend = SpeechBackend(str(model), codec=str(codec), max_seconds=seconds)
    backend.warm_up()
    running = Running(Service(ServerSettings("tiny", port=0), speech=backend))
    yield running, backend.pipe
    running.close()


@pytest.fixture
def say(served: tuple[Running, TextToSpeech]) -> Callable[..., Any]:
    """Ask for speech."""

    def post(text: str = TEXTS[0], **fields: Any) -> Any:
        return served[0].http.post(SPEECH, json={"input": text, **fields})

    return post


def test_shapes(served: tuple[Running, TextToSpeech], say: Callable[..., Any]) -> None:
    client = served[0].openai()
    made = client.audio.speech.create(
        model="tiny", voice="default", input=TEXTS[0], extra_body={"seed": 3}
    )
    with wave.open(io.BytesIO(made.content)) as sound:
        assert (sound.getnchannels(), sound.getsampwidth()) == (1, 2)
        rate, samples = sound.getframerate(), sound.readframes(sound.getnframes())
    assert rate == served[1].speech.sample_rate and samples
    raw = say(seed=3, response_format="pcm")
    assert raw.content == samples and raw.headers["x-sample-rate"] == str(rate)
    with client.audio.speech.with_streaming_response.create(
        model="tiny", voice="default", input=TEXTS[0], extra_body={"seed": 3}
    ) as streamed:
        assert b"".join(streamed.iter_bytes()) == made.content
    free = say()
    assert say(seed=int(free.headers["x-seed"])).content == free.content


def test_alone_in_company_and_at_the_command_line(
    served: tuple[Running, TextToSpeech], say: Callable[..., Any]
) -> None:
    running, pipe = served
    seconds = 0.05 if pipe.speech.sample_rate == 16000 else 0.008
    wait_until(lambda: running.service.engine._run is None)  # the model is free
    asked = [(TEXTS[k % 3], 60 + k) for k in range(6)]
    own = []
    for text, seed in asked:
        (made,) = pipe(text, seed=[seed], max_seconds=seconds).utterances
        own.append(to_wav(made.waveform, made.sample_rate))
    assert [say(text, seed=seed).content for text, seed in asked] == own
    gate = Gate(pipe.model)
    try:
        gate.close()
        together = []
        for k, (text, seed) in enumerate(asked):
            together.append(Later(lambda text=text, seed=seed: say(text, seed=seed)))  # type: ignore[misc]
            wait_until(lambda k=k: gate.passes == 1 and len(running.service.queue) == k)  # type: ignore[misc]
        gate.open()
        assert [each.result().content for each in together] == own
        assert max(gate.rows) > 1
    finally:
        gate.remove()


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no text": ({"input": ""}, "input", "missing_field"),
    "a long text": ({"input": "a" * 4001}, "input", "string_too_long"),
    "more than the model has positions for": ({"input": "a " * 1500}, "input", "invalid_value"),
    "a voice with a colon": ({"voice": "nobody:"}, "voice", "invalid_value"),
    "mp3": ({"response_format": "mp3"}, "response_format", "invalid_value"),
    "faster": ({"speed": 2.0}, "speed", "invalid_value"),
    "instructions": ({"instructions": "whisper"}, "instructions", "unknown_parameter"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields(say: Callable[..., Any], name: str) -> None:
    fields, param, code = WRONG[name]
    assert_error(say(**{"text": TEXTS[0], **fields}) if "input" not in fields else say(
        fields["input"]), 400, param, code)  # fmt: skip


def test_a_speech_model_draws_nothing(served: tuple[Running, TextToSpeech]) -> None:
    answer = served[0].http.post("/v1/images/generations", json={"prompt": "a"})
    assert_error(answer, 404, None, "unknown_url")


def test_only_its_own_routes_are_listed(served: tuple[Running, TextToSpeech]) -> None:
    message = served[0].http.get("/v1/nothing").json()["error"]["message"]
    assert SPEECH in message and "/v1/models" in message and "/v1/images" not in message


def test_who_asks_for_speech_has_turns(
    served: tuple[Running, TextToSpeech], say: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, clients = served[0].service.queue, []
    put = queue.put

    def put_noted(jobs: Any) -> None:
        clients.extend(job.ticket.client for job in jobs)
        put(jobs)

    monkeypatch.setattr(queue, "put", put_noted)
    assert say().status_code == 200 and clients == ["127.0.0.1"]
