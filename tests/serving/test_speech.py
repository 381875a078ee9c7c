"""`/v1/audio/speech`: the sound of `mmaccel speak`, alone and in company."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from mmaccel import Autoregressive, TextToSpeech
from mmaccel.batch.modalities import Speech
from mmaccel.batch.prompts import make_items, make_row
from mmaccel.commands.serve import SpeechFlags
from mmaccel.outputs.sound_files import to_pcm, to_wav
from mmaccel.serving.routes import SpeechRoute
from mmaccel.serving.server import open_engine
from mmaccel.serving.settings import ServerSettings
from tests.fixtures.speech import FAMILIES, SECONDS, TEXTS
from tests.fixtures.voices import build_voices, endless
from tests.serving.conftest import run_server
from tests.serving.running import Running, assert_error, later, wait_until

SPEECH = "/v1/audio/speech"
Folders = dict[str, tuple[Path, Path]]
Say = Callable[..., Any]


FIRST, *REST = FAMILIES


@pytest.fixture(
    scope="module", params=[FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in REST)]
)
def served(request: Any, speech_folders: Folders) -> Iterator[tuple[Running, TextToSpeech]]:
    """A server of a family's tiny model, and the model once more, which no server runs."""
    model, codec = speech_folders[request.param]
    seconds = SECONDS[request.param]
    setup = Speech(model=str(model), codec=str(codec), max_seconds=seconds)
    with run_server(SpeechRoute(setup)) as running:
        yield running, TextToSpeech.from_pretrained(str(model), codec=str(codec), device="cpu")


@pytest.fixture
def say(served: tuple[Running, TextToSpeech]) -> Say:
    """Ask for speech."""
    return lambda text=TEXTS[0], **fields: served[0].http.post(
        SPEECH, json={"input": text, **fields}
    )


def test_alone_in_company_and_at_the_command_line(
    served: tuple[Running, TextToSpeech], say: Say
) -> None:
    running, pipe = served
    seconds = SECONDS["llasa" if pipe.speech.sample_rate == 16000 else "orpheus"]
    asked = [(TEXTS[k % 3], 60 + k) for k in range(4)]
    alone = [say(text, seed=seed).content for text, seed in asked]
    with running.gate(is_closed=True) as gate:
        together = [later(partial(say, text, seed=seed)) for text, seed in asked]
        engine = running.engine
        wait_until(lambda: len(engine.waiting) + len(engine.running) == len(asked))
        gate.open()
        assert [each.result().content for each in together] == alone
        assert max(gate.rows) > 1
    for (text, seed), sound in zip(asked, alone):
        (made,) = pipe(text, seed=[seed], max_seconds=seconds).utterances
        assert sound == to_wav(made.waveform, made.sample_rate)
    client = running.openai().audio.speech
    spoken: Any = {"model": "tiny", "voice": "default", "input": TEXTS[0]}
    assert client.create(**spoken, extra_body={"seed": 60}).content == alone[0]
    assert alone[0].endswith(say(seed=60, response_format="pcm").content)
    free = say()
    assert say(seed=int(free.headers["x-seed"])).content == free.content


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, TextToSpeech]]:
    """The same of a model whose codec decodes chunks, of 0.2 s, and which speaks for 1.2 s."""
    folder = build_voices(tmp_path_factory.mktemp("voices"))
    setup = Speech(model=str(folder), policy="autoregressive", max_seconds=1.2)
    route = SpeechRoute(setup, chunk_seconds=0.2)
    alone = TextToSpeech.from_pretrained(folder)
    with endless(route.pipe), endless(alone), run_server(route) as running:
        yield running, alone


LONG = "a red fox a blue cat. seven red cat a fox"
STREAM: dict[str, Any] = {"input": "a red fox", "seed": 4, "stream_format": "audio"}


def read_events(answer: Any) -> list[dict[str, Any]]:
    """The data of server-sent events."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line[:6] == "data: "]


@pytest.mark.parametrize("text", [STREAM["input"], LONG], ids=["at once", "in parts"])
def test_chunks_of_sound(voices: tuple[Running, TextToSpeech], text: str) -> None:
    """What comes is `TextToSpeech.stream`, as WAV of unknown length, as samples, and as events; the
    whole is `mmaccel speak`.
    """
    running, pipe = voices
    (made,) = pipe(text, seed=[4], max_seconds=1.2).utterances
    parts = [
        to_pcm(part.waveform)
        for part in pipe.stream(text, seed=4, max_seconds=1.2, chunk_seconds=0.2)
    ]
    asked = STREAM | {"input": text}
    whole = running.http.post(SPEECH, json=asked | {"stream_format": None})
    assert whole.content == to_wav(made.waveform, made.sample_rate)
    answer = running.http.post(SPEECH, json=asked)
    with wave.open(io.BytesIO(answer.content)) as sound:
        assert (sound.getnchannels(), sound.getsampwidth()) == (1, 2)
        assert sound.getframerate() == 16000 and sound.readframes(10**9) == b"".join(parts)
    said = {name: answer.headers[name] for name in ("x-seed", "x-sample-rate", "content-type")}
    assert said == {"x-seed": "4", "x-sample-rate": "16000", "content-type": "audio/wav"}
    sse = {"stream_format": "sse", "response_format": "pcm"}
    *deltas, done = read_events(running.http.post(SPEECH, json=asked | sse))
    assert [each["type"] for each in deltas] == ["speech.audio.delta"] * len(parts)
    assert [base64.b64decode(each["audio"]) for each in deltas] == parts and len(parts) > 1
    assert done["type"] == "speech.audio.done"
    assert done["usage"]["output_tokens"] == len(made.tokens) and done["usage"]["input_tokens"] > 0
    assert running.metric("mmaccel_first_audio_seconds_count") > 0


def test_by_default_the_length_is_what_a_text_leaves(tmp_path: Path) -> None:
    """It is that of `mmaccel speak --prompts`; parts without room in the queue follow others."""
    settings = ServerSettings(name="tiny", port=0, rows=2, queue=1)
    engine = open_engine(settings, "speech", str(build_voices(tmp_path)), **asdict(SpeechFlags()))
    route, said = engine.route, {}
    for text in ("a red fox", LONG):
        (item,) = make_items([make_row(prompt=text, seed=4)], 0)
        options = dict(route.setup.plan(item, route.pipe).options)
        (made,) = route.pipe(text, seed=[4], **options).utterances
        said[text] = to_wav(made.waveform, made.sample_rate)
    running = Running(engine)
    for text, sound in said.items():
        assert running.http.post(SPEECH, json={"input": text, "seed": 4}).content == sound
    assert running.metric('mmaccel_rows_total{end="done"}') == 1 + 3
    running.close()


def test_sound_comes_before_the_end_and_a_client_may_go(
    voices: tuple[Running, TextToSpeech],
) -> None:
    running, _ = voices
    name = 'mmaccel_rows_total{end="cancelled"}'
    cancelled = running.metric(name)

    def listen() -> bytes:
        with running.http.stream("POST", SPEECH, json=STREAM) as answer:
            return next(answer.iter_raw())

    with running.gate(is_closed=True) as gate:
        heard = later(listen)
        gate.wait_for(1)
        gate.step_until(heard.done)
        assert len(heard.result()) >= 44 + 640
        gate.open()
        wait_until(lambda: running.metric(name) == cancelled + 1)


def test_what_fails_ends_the_answer(voices: tuple[Running, TextToSpeech]) -> None:
    """Before the first chunk it is an error; later, events say so, and a body of sound has no end.
    The row does not begin again.
    """
    running, pipe = voices
    plain = Autoregressive()
    parts = list(pipe.stream("a red fox", seed=4, policy=plain, max_seconds=1.2, chunk_seconds=0.2))
    name = f'mmaccel_requests_total{{route="{SPEECH}",status="500"}}'
    before = running.metric(name)
    for n, form in ((1, "audio"), (parts[1].passes + 2, "sse"), (parts[1].passes + 2, "audio")):
        assert n < parts[-1].passes - 1
        with running.gate() as gate:
            gate.check = lambda _, gate=gate, n=n: 1 / (gate.passes <= n)  # type: ignore[misc]
            try:
                answer = running.http.post(SPEECH, json=STREAM | {"stream_format": form})
            except httpx.RemoteProtocolError:
                assert n > 1 and form == "audio"
            else:
                if n == 1:
                    assert_error(answer, 500, None, "internal")
                else:
                    assert "speech.audio.delta" in answer.text and "event: error" in answer.text
                    assert "speech.audio.done" not in answer.text
            assert gate.passes == n + 1
    wait_until(lambda: running.metric(name) == before + 2)


def test_wrong_requests(voices: tuple[Running, TextToSpeech]) -> None:
    running, _ = voices
    for fields, param, code in (
        ({"input": ""}, "input", "invalid_value"),
        ({"input": "a red dog"}, "input", "invalid_value"),
        ({"input": "a" * 4001}, "input", "string_too_long"),
        ({"voice": "nobody:"}, "voice", "invalid_value"),
        ({"speed": 2.0}, "speed", "invalid_value"),
        ({"instructions": "whisper"}, "instructions", "unknown_parameter"),
    ):
        assert_error(running.http.post(SPEECH, json=STREAM | fields), 400, param, code)
    answer = running.http.post("/v1/images/generations", json={"prompt": "a"})
    assert SPEECH in assert_error(answer, 404, None, "unknown_url")
