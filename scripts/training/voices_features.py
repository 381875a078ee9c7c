"""`voices-features`, trained to recognise phonemes and speakers, and its figures.

The loss is that of connectionist temporal classification (see `voices_judge`) and the cross entropy
of the speaker, read from the mean of a window's columns as features are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, ctc_loss, interpolate

from mmaccel.demo.features import save_features
from mmaccel.demo.voices.features import (
    RATE,
    SpeechFeatures,
    cut_windows,
    extract_speech_features,
    load_speech_features,
)
from mmaccel.demo.voices.words import SPEAKERS
from mmaccel.evaluation.quality.frechet import frechet_of
from scripts.training.feature_fit import FeatureFit, Measured, export_card, fit
from scripts.training.voices_data import Pool, open_pool
from scripts.training.voices_judge import Phones, edit_distance, read_lexicon

NAME = "features"
_COLUMN = 320  # samples
_STANDARD = 400  # utterances that fix mean and deviation
_NOTE = (
    "Noise: standard deviation in -1..1. Far from what the network knows distances are not graded: "
    "sound below 1 kHz is no farther than sound below 2 kHz."
)


def train_speech_features(target: str | Path, work: str | Path, plan: FeatureFit) -> None:
    """Trains, or goes on training, and writes `target/model.safetensors` (float16).

    Args:
        target: folder of the shipped weights; made where missing.
        work: holds the pool `train`; receives state and log.
        plan: steps and batch.
    """
    work = Path(work)
    pool = open_pool(work, "train")
    phones = Phones(read_lexicon(work))
    torch.manual_seed(0)
    model = SpeechFeatures(len(phones.names), len(SPEAKERS))

    def loss(step: int) -> Tensor:
        rows = np.random.default_rng((31, step)).integers(len(pool), size=plan.batch)
        return measure_loss(model, pool, phones, rows.tolist())

    fit(model, plan, loss, work, NAME)
    chosen = range(min(_STANDARD, len(pool)))
    model.standardise(torch.cat([cut_windows(torch.from_numpy(pool.utterance(k))) for k in chosen]))
    save_features(model, Path(target))


def measure_loss(model: SpeechFeatures, pool: Pool, phones: Phones, rows: list[int]) -> Tensor:
    """The sum of both heads' losses, a scalar.

    Args:
        model: to be trained.
        pool: of the utterances.
        phones: of their sentences.
        rows: B numbers of utterances.
    """
    sounds = [torch.from_numpy(pool.utterance(row)) for row in rows]
    width = max(len(sound) for sound in sounds)
    width += -width % _COLUMN
    padded = torch.stack([torch.nn.functional.pad(s, (0, width - len(s))) for s in sounds])
    said = [phones.ids(pool.sentences[row]) for row in rows]
    columns = model.columns(padded)
    found = ctc_loss(
        model.phones(columns).log_softmax(-1).transpose(0, 1),
        torch.tensor([k for sentence in said for k in sentence]),
        torch.tensor([len(sound) // _COLUMN for sound in sounds]),
        torch.tensor([len(sentence) for sentence in said]),
        zero_infinity=True,
    )
    windows = [cut_windows(sound) for sound in sounds]
    speakers = torch.from_numpy(pool.speakers[rows]).repeat_interleave(
        torch.tensor([len(own) for own in windows])
    )
    return found + cross_entropy(model.speakers(model.raw(torch.cat(windows))), speakers)


def export_speech_features_card(
    work: str | Path, target: str | Path, plan: FeatureFit, count: int = 300
) -> dict[str, Any]:
    """Measures the network that ships and writes its card.

    Args:
        work: of the training.
        target: holds the weights.
        plan: of the training.
        count: utterances of each figure.
    """
    work = Path(work)
    measured = Measured(
        "voices-features",
        "runs/voices",
        count,
        measure_accuracy(work, count),
        count,
        measure_distances(work, count),
        (_NOTE,),
    )
    return export_card(
        measured, load_speech_features(), work / f"{NAME}.jsonl", plan.batch, Path(target)
    )


@torch.no_grad()
def measure_accuracy(work: Path, count: int) -> dict[str, float]:
    """Of held-out utterances: phonemes less edits, over those to say, and the share of windows of
    which the speaker is right.
    """
    pool = open_pool(work, "validation")
    phones = Phones(read_lexicon(work))
    model = load_speech_features()
    edits, total, right, windows = 0, 0, 0, 0
    for k in range(count):
        sound = torch.from_numpy(pool.utterance(k))
        best = model.phones(model.columns(sound[None]))[0].argmax(-1).tolist()
        changed = [one for one, before in zip(best, [0, *best], strict=False) if one != before]
        said = phones.ids(pool.sentences[k])
        edits += edit_distance([one for one in changed if one], said)
        total += len(said)
        own = model.speakers(model.raw(cut_windows(sound))).argmax(-1)
        right += int((own == int(pool.speakers[k])).sum())
        windows += len(own)
    return {"phonemes": round(1 - edits / total, 4), "speakers": round(right / windows, 4)}


def measure_distances(work: Path, count: int) -> dict[str, float]:
    """Fréchet distances of damaged utterances from as many whole ones, by damage."""
    pool = open_pool(work, "validation")
    sounds = [torch.from_numpy(pool.utterance(k)) for k in range(2 * count)]
    first = _features(sounds[:count])
    found = {}
    for name, damage in DAMAGES.items():
        features = _features([damage(sound) for sound in sounds[count:]])
        found[name] = round(frechet_of(first, features).distance, 4)
    return found


def _features(sounds: list[Tensor]) -> np.ndarray:
    found: np.ndarray = torch.cat([extract_speech_features(s) for s in sounds]).numpy()
    return found


def add_noise(sound: Tensor, strength: float) -> Tensor:
    """Normal noise of a standard deviation on `[samples]` in -1..1."""
    generator = torch.Generator().manual_seed(len(sound))
    return (sound + strength * torch.randn(sound.shape, generator=generator)).clamp(-1, 1)


def low_pass(sound: Tensor, highest: float) -> Tensor:
    """What is above a frequency in Hz removed from `[samples]`."""
    spectrum = torch.fft.rfft(sound)
    spectrum[torch.fft.rfftfreq(len(sound), 1 / RATE) > highest] = 0
    return torch.fft.irfft(spectrum, len(sound))


def change_speed(sound: Tensor, factor: float) -> Tensor:
    """`[samples]` played faster by a factor, and higher."""
    length = round(len(sound) / factor)
    return interpolate(sound[None, None], size=length, mode="linear", align_corners=True)[0, 0]


DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda s: s,
    "noise 0.002": lambda s: add_noise(s, 0.002),
    "noise 0.01": lambda s: add_noise(s, 0.01),
    "noise 0.05": lambda s: add_noise(s, 0.05),
    "below 4 kHz": lambda s: low_pass(s, 4000),
    "below 2 kHz": lambda s: low_pass(s, 2000),
    "below 1 kHz": lambda s: low_pass(s, 1000),
    "1.1 times as fast": lambda s: change_speed(s, 1.1),
    "1.25 times as fast": lambda s: change_speed(s, 1.25),
    "1.5 times as fast": lambda s: change_speed(s, 1.5),
}
