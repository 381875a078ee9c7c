"""`voices` with 16 codes a frame: what it speaks, plain and under windows along depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmaccel
from mmaccel.demo.voices.stacked import StackedVoices, open_stacked
from mmaccel.errors import OptionError

TEXT = "the red bird sings"


@pytest.fixture(scope="module")
def voices() -> StackedVoices:
    return open_stacked()


def test_windows_speak_what_the_plain_loop_speaks(voices: StackedVoices) -> None:
    made = {}
    for policy in (mmaccel.Autoregressive(), mmaccel.Jacobi(window=4), mmaccel.Jacobi(window=16)):
        with mmaccel.attach(voices.model, policy, seed=5, strict=True) as handle:
            made[policy] = voices.speak(TEXT, seed=5)
        assert handle.stats is not None
        frames = len(made[policy].codes) + made[policy].is_finished
        assert (handle.stats.passes == 15 * frames) == (policy == mmaccel.Autoregressive())
        assert handle.stats.passes <= 15 * frames
    plain, *others = made.values()
    assert plain.is_finished and len(plain.codes) > 2
    for other in others:
        assert torch.equal(other.codes, plain.codes)
        assert torch.equal(other.waveform, plain.waveform)


def test_an_utterance_is_as_long_as_its_frames(voices: StackedVoices) -> None:
    spoken = voices.speak(TEXT, "ben", seed=1)
    assert spoken.sample_rate == 16_000 and voices.frame_seconds == pytest.approx(0.16)
    assert len(spoken.waveform) == len(spoken.codes) * 2560
    assert bool((spoken.waveform.abs() <= 1).all()) and float(spoken.waveform.abs().max()) > 0.05
    assert 0.5 < len(spoken.waveform) / 16_000 < 2.5
    again = voices.speak(TEXT, "ben", seed=1)
    assert torch.equal(again.waveform, spoken.waveform)
    cut = voices.speak(TEXT, "ben", seed=1, max_seconds=0.2)
    assert torch.equal(cut.codes, spoken.codes[:1]) and not cut.is_finished


def test_what_it_cannot_say_is_refused(voices: StackedVoices) -> None:
    for seconds in (0.1, 60):
        with pytest.raises(OptionError, match=r"max_seconds: expected 0\.16, one frame, to 2"):
            voices.speak(TEXT, max_seconds=seconds)
    wrong: list[tuple[str, Any]] = [
        ("max_seconds", float("nan")), ("max_seconds", "3"), ("temperature", -1),
        ("seed", "a"), ("seed", [1]), ("seed", 2**70),
    ]  # fmt: skip
    for name, value in wrong:
        with pytest.raises(OptionError, match=f"{name}: expected"):
            voices.speak(TEXT, **{name: value})
    with pytest.raises(OptionError, match="voice: expected one of ada"):
        voices.speak(TEXT, "eve")
    with pytest.raises(OptionError, match="words that the model knows"):
        voices.speak("xylophone")


def test_greedy_codes_need_no_seed_and_draws_leave_torchs_own_alone(voices: StackedVoices) -> None:
    torch.manual_seed(0)
    wanted = torch.rand(2)
    torch.manual_seed(0)
    made = [voices.generate(TEXT, seed=seed, temperature=0, max_seconds=0.5) for seed in (1, 2)]
    assert torch.equal(*made)
    assert torch.equal(torch.rand(2), wanted)


def test_an_utterance_that_ends_at_once_is_silent(
    voices: StackedVoices, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = torch.full((1, 16), voices.model.config.codebook_eos_token_id)
    monkeypatch.setattr(voices, "generate", lambda *_, **__: end)
    spoken = voices.speak(TEXT)
    assert spoken.is_finished and len(spoken.codes) == len(spoken.waveform) == 0


def test_a_folder_without_it_is_refused(tmp_path: Path) -> None:
    home = Path(mmaccel.__file__).parent / "demo" / "weights" / "voices"
    for file in home.iterdir():
        if file.is_file():
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(OptionError, match="expected one with depth/config.json"):
        open_stacked(tmp_path)
