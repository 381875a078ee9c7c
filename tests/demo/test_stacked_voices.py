"""`voices` with 16 codes a frame: what it speaks, plain and under windows along depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.catalog import DEMO_WEIGHTS
from mmaccel.demo.voices.stacked import StackedVoices, open_stacked
from mmaccel.errors import OptionError

TEXT = "the red bird sings"


@pytest.fixture(scope="module")
def voices() -> StackedVoices:
    return open_stacked()


@pytest.mark.slow
def test_windows_speak_what_the_plain_loop_speaks(voices: StackedVoices) -> None:
    made = []
    for policy in (mmaccel.Autoregressive(), mmaccel.Jacobi(window=4), mmaccel.Jacobi(window=16)):
        with mmaccel.attach(voices.model, policy, seed=5, strict=True) as handle:
            made.append(voices.speak(TEXT, seed=5))
        assert handle.stats is not None
        frames = len(made[-1].codes) + made[-1].is_finished
        assert (handle.stats.passes == 15 * frames) == (policy == mmaccel.Autoregressive())
    for spoken in made:
        assert spoken.is_finished and torch.equal(spoken.codes, made[0].codes)
        assert torch.equal(spoken.waveform, made[0].waveform)


def test_an_utterance_is_as_long_as_its_frames(voices: StackedVoices) -> None:
    torch.manual_seed(0)
    wanted = torch.rand(2)
    torch.manual_seed(0)
    spoken = voices.speak(TEXT, "ben", seed=1)
    assert torch.equal(torch.rand(2), wanted)  # torch's own generator is left as it was
    assert spoken.sample_rate == 16_000 and voices.frame_seconds == pytest.approx(0.16)
    assert len(spoken.waveform) == len(spoken.codes) * 2560
    assert 0.05 < float(spoken.waveform.abs().max()) <= 1
    cut = voices.speak(TEXT, "ben", seed=1, max_seconds=0.2)
    assert torch.equal(cut.codes, spoken.codes[:1]) and not cut.is_finished
    greedy = [voices.generate(TEXT, seed=k, temperature=0, max_seconds=0.5) for k in (1, 2)]
    assert torch.equal(*greedy)


def test_what_it_cannot_say_is_refused(voices: StackedVoices, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_seconds": 0.1}, r"max_seconds: expected 0\.16, one frame, to 2"),
        ({"voice": "eve"}, "voice: expected one of ada"),
        ({"text": "xylophone"}, "words that the model knows"),
    ]
    for given, says in wrong:
        with pytest.raises(OptionError, match=says):
            voices.speak(**{"text": TEXT, **given})
    for file in (DEMO_WEIGHTS / "voices").iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(OptionError, match="expected one with depth/config.json"):
        open_stacked(tmp_path)
