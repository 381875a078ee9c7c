"""`/v1/audio/speech`: the sound of `mmaccel speak`, alone and in company."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from mmaccel import Autoregressive, TextToSpeech
from mmaccel.batch.prompts import make_items, make_row
from mmaccel.batch.speech import SpeechSetup
from mmaccel.commands.serve import SpeechFlags
from mmaccel.outputs.sound_files import to_pcm, to_wav
from mmaccel.serving.routes import SpeechRoute
from mmaccel.serving.server import open_engine
from mmaccel.serving.settings import ServerSettings
from tests.fixtures.speech import FAMILIES, SECONDS, TEXTS
from tests.fixtures.voices import build_voices, endless, silent
from tests.serving.conftest import run_server
from tests.serving.running import Running, assert_error, later, wait_until

SPEECH = "/v1/audio/speech"
Folders = dict[str, tuple[Path, Path]]
Say = Callable[..., Any]


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: Any, speech_folders: Folders) -> Iterator[tuple[Running, TextToSpeech]]:
    """A server of a family's tiny model, and the model once more, which no server runs."""
    model, codec = speech_folders[request.param]
    seconds = SECONDS[request.param]
    setup = SpeechSetup(str(model), Path(), codec=str(codec), max_seconds=seconds)
    with run_server(SpeechRoute(setup)) as running:
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
    served: tuple[Running, TextToSpeech], say: Say
) -> None:
    running, pipe = served
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
    for (text, seed), sound in zip(asked, alone):
        (made,) = pipe(text, seed=[seed], max_seconds=seconds).utterances
        assert sound == to_wav(made.waveform, made.sample_rate)


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, TextToSpeech]]:
    """The same of a model whose codec decodes chunks, of 0.2 s, and which speaks for 1.2 s."""
    folder = build_voices(tmp_path_factory.mktemp("voices"))
    setup = SpeechSetup(str(folder), Path(), policy="autoregressive", max_seconds=1.2)
    route = SpeechRoute(setup, chunk_seconds=0.2)
    alone = TextToSpeech.from_pretrained(folder)
    with endless(route.pipe), endless(alone), run_server(route) as running:
        yield running, alone


STREAM: dict[str, Any] = {"input": "a red fox", "seed": 4, "stream_format": "audio"}


def test_chunks_of_sound(voices: tuple[Running, TextToSpeech]) -> None:
    """What comes is `TextToSpeech.stream`, as WAV of unknown length, as samples, and as events."""
    running, pipe = voices
    parts = list(pipe.stream("a red fox", seed=4, max_seconds=1.2, chunk_seconds=0.2))
    wanted = b"".join(to_pcm(part.waveform) for part in parts)
    with running.http.stream("POST", SPEECH, json=STREAM) as answer:
        assert answer.headers["transfer-encoding"] == "chunked"
        assert (answer.headers["x-seed"], answer.headers["x-sample-rate"]) == ("4", "16000")
        assert answer.headers["content-type"] == "audio/wav"
        data = answer.read()
    with wave.open(io.BytesIO(data)) as sound:
        assert (sound.getnchannels(), sound.getsampwidth()) == (1, 2)
        assert sound.getframerate() == 16000 and sound.readframes(10**9) == wanted
    raw = running.http.post(SPEECH, json=STREAM | {"response_format": "pcm"})
    assert raw.content == wanted and raw.headers["content-type"] == "audio/pcm"
    said = running.http.post(
        SPEECH, json=STREAM | {"stream_format": "sse", "response_format": "pcm"}
    )
    assert said.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in said.text.splitlines() if line[:6] == "data: "]
    assert [event["type"] for event in events] == [
        *["speech.audio.delta"] * len(parts),
        "speech.audio.done",
    ]
    audio = [base64.b64decode(event["audio"]) for event in events[:-1]]
    assert audio == [to_pcm(part.waveform) for part in parts] and len(parts) > 1
    usage = events[-1]["usage"]
    assert usage["output_tokens"] == len(wanted) // 640 and usage["input_tokens"] > 0
    client = running.openai().audio.speech.with_streaming_response
    with client.create(
        model="tiny", voice="default", input="a red fox", response_format="pcm",
        stream_format="audio", extra_body={"seed": 4},
    ) as streamed:  # fmt: skip
        assert b"".join(streamed.iter_bytes()) == wanted
    assert running.metric("mmaccel_first_audio_seconds_count") == 4


def test_an_utterance_without_sound_is_a_wav_too(voices: tuple[Running, TextToSpeech]) -> None:
    running, _ = voices
    with silent(running.engine.route.pipe):
        heard = running.http.post(SPEECH, json=STREAM).content
        text = running.http.post(SPEECH, json=STREAM | {"stream_format": "sse"}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line[:6] == "data: "]
    assert [event["type"] for event in events] == ["speech.audio.delta", "speech.audio.done"]
    assert base64.b64decode(events[0]["audio"]) == heard
    with wave.open(io.BytesIO(heard)) as sound:
        assert sound.readframes(10**9) == b""


LONG = "a red fox a blue cat. seven red cat a fox"


def test_a_text_is_said_in_parts(voices: tuple[Running, TextToSpeech]) -> None:
    """The utterance of `mmaccel speak`, whole and in chunks."""
    running, pipe = voices
    (made,) = pipe(LONG, seed=[4], max_seconds=1.2).utterances
    assert made.seconds > 3 * 1.1
    asked = STREAM | {"input": LONG}
    whole = running.http.post(SPEECH, json=asked | {"stream_format": None})
    assert whole.content == to_wav(made.waveform, made.sample_rate)
    parts = list(pipe.stream(LONG, seed=4, max_seconds=1.2, chunk_seconds=0.2))
    raw = running.http.post(SPEECH, json=asked | {"response_format": "pcm"})
    assert raw.content == b"".join(to_pcm(part.waveform) for part in parts)
    text = running.http.post(SPEECH, json=asked | {"stream_format": "sse"}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line[:6] == "data: "]
    assert len(events) == len(parts) + 1
    assert events[-1]["usage"]["output_tokens"] == len(made.tokens)


def test_by_default_the_length_is_what_a_text_leaves(tmp_path: Path) -> None:
    """It is that of `mmaccel speak --prompts`; parts without room in the queue follow others."""
    settings = ServerSettings(name="tiny", port=0, rows=2, queue=1)
    engine = open_engine(settings, "speech", str(build_voices(tmp_path)), **asdict(SpeechFlags()))
    route = engine.route
    said = {}
    for text in ("a red fox", LONG):
        (item,) = make_items([make_row(prompt=text, seed=4)], 0)
        options = dict(route.setup.plan(item, route.pipe).options)
        (made,) = route.pipe(text, seed=[4], **options).utterances
        said[text] = to_wav(made.waveform, made.sample_rate)
    running = Running(engine)
    try:
        for text, sound in said.items():
            assert running.http.post(SPEECH, json={"input": text, "seed": 4}).content == sound
        assert running.metric('mmaccel_rows_total{end="done"}') == 1 + 3
    finally:
        running.close()


def test_sound_comes_before_the_end_and_a_client_may_go(
    voices: tuple[Running, TextToSpeech],
) -> None:
    running, _ = voices
    cancelled = running.metric('mmaccel_rows_total{end="cancelled"}')
    with running.gate(is_closed=True) as gate:

        def listen() -> bytes:
            with running.http.stream("POST", SPEECH, json=STREAM) as answer:
                pieces = answer.iter_raw()
                return next(pieces) + next(pieces)

        heard = later(listen)
        gate.wait_for(1)
        for k in range(2, 400):
            gate.permit(1)
            wait_until(lambda k=k: gate.passes == k or heard.done())
            if heard.done():
                break
        assert len(heard.result()) >= 44 + 640
        gate.open()
        name = 'mmaccel_rows_total{end="cancelled"}'
        wait_until(lambda: running.metric(name) == cancelled + 1)


def test_what_fails_before_the_first_sound_is_an_error(
    voices: tuple[Running, TextToSpeech],
) -> None:
    running, _ = voices
    answer = running.http.post(SPEECH, json=STREAM | {"input": "a red dog"})
    assert "'dog'" in assert_error(answer, 400, "input", "invalid_value")
    with running.gate() as gate:
        gate.check = _fail_after(1)
        answer = running.http.post(SPEECH, json=STREAM)
        assert_error(answer, 500, None, "internal")


def test_what_fails_later_ends_the_answer(voices: tuple[Running, TextToSpeech]) -> None:
    """Events say so; a body of sound has no end. The row does not begin again."""
    running, pipe = voices
    plain = Autoregressive()
    parts = list(pipe.stream("a red fox", seed=4, policy=plain, max_seconds=1.2, chunk_seconds=0.2))
    n = parts[1].passes
    assert n < parts[-1].passes - 4
    name = f'mmaccel_requests_total{{route="{SPEECH}",status="500"}}'
    for form in ("sse", "audio"):
        wanted = running.metric(name) + 1
        with running.gate() as gate:
            gate.check = _fail_after(n + 2)
            fields = STREAM | {"stream_format": form}
            if form == "audio":
                with pytest.raises(httpx.RemoteProtocolError):
                    running.http.post(SPEECH, json=fields)
                wait_until(lambda wanted=wanted: running.metric(name) == wanted)
            else:
                text = running.http.post(SPEECH, json=fields).text
                assert "event: speech.audio.delta" in text and "event: error" in text
                assert "speech.audio.done" not in text
            assert gate.passes == n + 3


def _fail_after(n: int) -> Callable[[int], None]:
    """A check of a gate that lets n passes through."""
    left = n

    def check(_: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("broken")

    return check


WRONG: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"text": ""}, "input", "invalid_value"),
    ({"text": "a" * 4001}, "input", "string_too_long"),
    ({"text": "a " * 1500}, "input", "invalid_value"),  # more than the model has positions for
    ({"voice": "nobody:"}, "voice", "invalid_value"),
    ({"speed": 2.0}, "speed", "invalid_value"),
    ({"instructions": "whisper"}, "instructions", "unknown_parameter"),
)


@pytest.mark.parametrize(("fields", "param", "code"), WRONG, ids=range(len(WRONG)))
def test_wrong_fields(say: Say, fields: dict[str, Any], param: str, code: str) -> None:
    assert_error(say(**fields), 400, param, code)


def test_a_speech_model_draws_nothing(served: tuple[Running, TextToSpeech]) -> None:
    answer = served[0].http.post("/v1/images/generations", json={"prompt": "a"})
    assert SPEECH in assert_error(answer, 404, None, "unknown_url")
