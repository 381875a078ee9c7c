"""`TextToSpeech` and `ImageToVideo`: seeds, batches, delivery and bad arguments of both."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel import Jacobi
from mmaccel.errors import NumericsError
from mmaccel.pipelines.image_to_video import registry as image_to_video
from mmaccel.pipelines.text_to_speech import registry as speech_models
from tests.fixtures.media import MEDIA, MediaCase, content
from tests.fixtures.shared import media_folders, media_pipe

AUTHORS = {
    "llasa": "HKUSTAudio/xcodec2-hf",
    "orpheus": "hubertsiuzdak/snac_24khz",
    "cosmos": "nvidia/Cosmos-Tokenize1-DV8x16x16-720p",
}


@pytest.fixture(params=MEDIA)
def case(request: pytest.FixtureRequest) -> MediaCase:
    """A pipeline for all tests, which leave it as it was."""
    kind = request.param
    return MediaCase(kind, media_folders(kind), media_pipe(kind))


def assert_same(a: Any, b: Any) -> None:
    assert torch.equal(a.tokens, b.tokens) and torch.equal(content(a), content(b))


def test_a_seed_of_minus_one_is_drawn_and_said(case: MediaCase) -> None:
    made = case.call([-1], index=1, temperature=9.0)[0]
    assert 0 <= made.seed < 2**32
    assert_same(made, case.call([made.seed], index=1, temperature=9.0)[0])


def test_payloads_are_delivered_as_they_end_and_the_next_rows_start(case: MediaCase) -> None:
    few: dict[str, Any] = {"policy": Jacobi(window=8), "temperature": 0.4, "top_p": 1.0}
    seeds = [6, 0, 5, 2, 2**64 - 1]
    wanted = case.call(seeds, **few)
    for asked, most in ((2, 2), (None, 5)):
        events: list[Any] = []  # payloads, and rows of a pass
        made = case.call(
            seeds, batch_size=asked, **few, deliver=events.append,
            on_step=lambda state, events=events: events.append(state.rows),
        )  # fmt: skip
        done = [event for event in events if not isinstance(event, tuple)]
        rows = [event for event in events if isinstance(event, tuple)]
        assert max(map(len, rows)) == most and {r for each in rows for r in each} == set(range(5))
        assert sorted(each.index for each in done) == [0, 1, 2, 3, 4]
        for each in done:
            assert each is made[each.index] and each.passes == wanted[each.index].passes
            assert_same(each, wanted[each.index])
        first = next(k for k, event in enumerate(events) if event is done[0])
        assert most == 5 or rows[-1] in events[first:]  # long before the last pass
        if most == 2:
            assert made.stats.passes < made.stats.row_passes == sum(d.passes for d in done)


def test_an_exception_from_deliver_ends_the_run_and_one_runs_at_a_time(case: MediaCase) -> None:
    got: list[Any] = []

    def stop(made: Any) -> None:
        got.append(made)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        case.call([3, 4, 5], batch_size=1, deliver=stop)
    with pytest.raises(mmaccel.BusyError):
        case.call([1], on_step=lambda _: case.call([1]))
    assert len(got) == 1 and len(case.call([1])) == 1  # and the model is free


def test_nan_of_the_model_is_refused(case: MediaCase) -> None:
    def spoil(_: Any, __: Any, made: Any) -> None:
        made.logits.fill_(math.nan)

    hook = case.hidden.register_forward_hook(spoil)
    try:
        with pytest.raises(NumericsError) as error:
            case.call([1, 2], batch_size=1)
    finally:
        hook.remove()
    assert error.value.rows == (0,)


def test_the_default_codec_is_the_authors(case: MediaCase, monkeypatch: Any) -> None:
    model, codec = case.folders
    asked: list[object] = []

    def find(name: Any, shipped: Any, option: str = "model", hub: Any = None) -> Path:
        asked.append(name)
        return codec if option == "codec" else Path(name)

    monkeypatch.setattr(speech_models if case.speaks else image_to_video, "find_model", find)
    pipe = type(case.pipe).from_pretrained(model)
    assert asked == [model, AUTHORS[case.kind]] and (pipe.source, pipe.codec) == (model, codec)
