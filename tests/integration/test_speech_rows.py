"""From ended rows to utterances, and what a call makes of its arguments: values by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel import TextToSpeech
from mmaccel.pipelines import speech_models, speech_parts
from mmaccel.pipelines.speech_plan import make_plan, pick_filters
from mmaccel.pipelines.text_to_speech import finish_utterance
from mmaccel.places import EndedRow
from mmaccel.tokenizers_vq.frames import Frames
from tests.speech_beds import FAMILIES, SECONDS, TEXTS


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize(
    ("tokens", "codes", "is_finished"),
    [
        ([5, 6, 5, 6, 9], [5, 6, 5, 6], True),  # the end at the very last slot
        ([5, 6, 5, 6, 5], [5, 6, 5, 6], False),  # a code there: cut
        ([5, 6, 9], [5, 6], True),
        ([9], [], True),
    ],
)
def test_where_an_utterance_ends(tokens: list[int], codes: list[int], is_finished: bool) -> None:
    """Two frames of two codes and a slot for the end, which is 9."""
    rendered: list[tuple[list[int], int]] = []

    def render(given: torch.Tensor, seed: int) -> torch.Tensor:
        rendered.append((given.tolist(), seed))
        return given / 10

    layout = Frames(((5, 6), (6, 7)), 10, (9,))
    speech: Any = SimpleNamespace(layout=layout, render=render, sample_rate=8)
    plan: Any = SimpleNamespace(texts=["a", "b"], voice="leo", seeds=[3, 7], length=5)
    made = finish_utterance(speech, plan, EndedRow(1, torch.tensor(tokens), 4, [], 0.25))
    assert made.tokens.tolist() == codes
    assert rendered == ([(codes, 7)] if codes else [])
    assert made.waveform.tolist() == pytest.approx([code / 10 for code in codes])
    assert made.is_finished is is_finished and made.seconds == len(codes) / 8
    assert (made.index, made.text, made.voice, made.seed) == (1, "b", "leo", 7)
    assert (made.passes, made.total_variation, made.sample_rate) == (4, 0.25, 8)


def test_the_penalty_counts_the_whole_prefix(
    speech_folders: dict[str, tuple[Path, Path]], family: str
) -> None:
    model, codec = speech_folders[family]
    speech = TextToSpeech.from_pretrained(model, codec=codec).speech
    processor = pick_filters(speech, repetition_penalty=2.0).processor
    assert processor is not None
    line = torch.full((1, 5000), 31)
    line[0, 0] = 30
    scores = torch.ones(1, 1, speech.window.vocab_size)
    punished = processor(scores, line, torch.tensor([[5000]]))[0, 0]
    assert punished[29:33].tolist() == [1, 0.5, 0.5, 1]
    assert pick_filters(speech, repetition_penalty=1).processor is None
    usual = pick_filters(speech).processor
    if family == "llasa":
        assert usual is None
    else:
        assert usual is not None
        punished = usual(scores, line, torch.tensor([[5000]]))[0, 0]
        assert punished[29:33].tolist() == pytest.approx([1, 1 / 1.3, 1 / 1.3, 1])


def test_no_more_rows_are_in_the_making_than_asked_for(
    speech_folders: dict[str, tuple[Path, Path]], family: str
) -> None:
    model, codec = speech_folders[family]
    pipe = TextToSpeech.from_pretrained(model, codec=codec)
    for asked, most in ((1, 1), (2, 2), (None, 3), (9, 3)):
        rows: list[int] = []
        pipe(
            TEXTS, seed=[3, 4, 5], max_seconds=SECONDS[family], batch_size=asked,
            on_step=lambda progress, rows=rows: rows.append(len(progress.rows)),
        )  # fmt: skip
        assert max(rows) == most
    assert make_plan(pipe.speech, TEXTS, 0, max_seconds=SECONDS[family]).max_num_seqs == 3


def test_the_codec_keeps_its_precision_and_its_bounds(
    speech_folders: dict[str, tuple[Path, Path]], family: str
) -> None:
    model, codec = speech_folders[family]
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
    sound = speech.render(tokens, 0)
    assert sound.dtype == torch.float32 and sound.unique().tolist() == [1.0]


def test_the_codec_that_none_names_is_the_authors(
    speech_folders: dict[str, tuple[Path, Path]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, codec = speech_folders[family]
    asked: list[object] = []

    def find(name: Any, shipped: Any, option: str = "model") -> Path:
        asked.append(name)
        return codec if option == "codec" else Path(name)

    monkeypatch.setattr(speech_models, "find_model", find)
    pipe = TextToSpeech.from_pretrained(model)
    authors = {"llasa": "HKUSTAudio/xcodec2-hf", "orpheus": "hubertsiuzdak/snac_24khz"}
    assert asked == [model, authors[family]]
    assert (pipe.source, pipe.codec) == (model, codec)


def test_a_model_is_tried_before_it_is_handed_out(
    speech_folders: dict[str, tuple[Path, Path]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, codec = speech_folders[family]
    tried: list[tuple[Any, Any]] = []
    monkeypatch.setattr(speech_parts, "check_by_trial", lambda *both: tried.append(both))
    speech: Any = TextToSpeech.from_pretrained(model, codec=codec).speech
    assert tried == [(speech.window.model, speech.window)]
