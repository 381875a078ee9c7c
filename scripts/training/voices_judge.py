"""A recogniser of phonemes that judges `voices`: convolutions and connectionist temporal
classification.

A. Graves et al., "Connectionist Temporal Classification", ICML 2006, by way of torch's `CTCLoss`;
decoding is greedy. It learns from espeak's sound and from what the codec makes of it, half each, so
that it does not hear the codec as an accent. Its error on both is measured on held-out sentences
and stands beside every figure that it gives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss

from mmaccel.tokenizers_vq.mel import magnitudes, mel_filters
from mmaccel.tokenizers_vq.speech_codec import Block, SpeechCodec, load_codec
from scripts.training.optim import mixed_precision
from scripts.training.voices_data import Pool, open_pool

_BANDS, _WIDTH, _DEPTH = 60, 160, 5
_N_FFT, _HOP, _RATE = 640, 160, 16_000
_STRESSES = ("'", ",")
_SAVED_EVERY = 120.0


def list_phones(lexicon: dict[str, list[str]]) -> list[str]:
    """The phonemes that are told apart; stress is not. Id 0 is the blank of CTC."""
    found = {name for word in lexicon.values() for name in word}
    return sorted(found - set(_STRESSES))


class Judge(nn.Module):
    """Magnitudes to logarithms of probabilities of phonemes, a column every 20 ms.

    Args:
        phones: how many there are; the blank is one more.
    """

    filters: Tensor
    window: Tensor

    def __init__(self, phones: int) -> None:
        super().__init__()
        filters = mel_filters(_BANDS, _N_FFT, _RATE).T.contiguous()
        self.register_buffer("filters", filters, persistent=False)
        self.register_buffer("window", torch.hann_window(_N_FFT), persistent=False)
        self.read = nn.Conv1d(_BANDS, _WIDTH, 4, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Block(_WIDTH, 3 * _WIDTH) for _ in range(_DEPTH)))
        self.head = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, phones + 1))

    def forward(self, spectrum: Tensor) -> Tensor:
        """Magnitudes [B, T, 321] every 10 ms to [B, T / 2, phones + 1]."""
        mel = (spectrum @ self.filters + 1e-3).log() / 3 + 1
        found: Tensor = self.head(self.blocks(self.read(mel.mT).mT))
        return found.float().log_softmax(-1)

    @torch.no_grad()
    def hear(self, sound: Tensor) -> list[int]:
        """Ids of the phonemes of one sound [samples] at 16 kHz."""
        if len(sound) < _N_FFT:
            return []
        spectrum = magnitudes(sound[None], _N_FFT, _HOP, self.window).mT
        best = self(spectrum)[0].argmax(-1).tolist()
        changed = [k for k, before in zip(best, [0, *best], strict=False) if k != before]
        return [k for k in changed if k]


def edit_distance(heard: Sequence[int], said: Sequence[int]) -> int:
    """Least number of insertions, deletions and replacements between two sequences."""
    row = list(range(len(said) + 1))
    for i, one in enumerate(heard, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(said, 1):
            replaced = diagonal + (one != other)
            diagonal = row[j]
            row[j] = min(replaced, row[j] + 1, row[j - 1] + 1)
    return row[-1]


class Phones:
    """Sentences as ids of phonemes.

    Args:
        lexicon: phonemes of every word.
    """

    def __init__(self, lexicon: dict[str, list[str]]) -> None:
        self.names = list_phones(lexicon)
        self.lexicon = lexicon
        self._ids = {name: k + 1 for k, name in enumerate(self.names)}

    def ids(self, sentence: Sequence[str]) -> list[int]:
        """Ids of a sentence's words."""
        names = [name for word in sentence for name in self.lexicon[word]]
        return [self._ids[name] for name in names if name not in _STRESSES]


def read_lexicon(work: Path) -> dict[str, list[str]]:
    """Phonemes of every word of a work folder."""
    found: dict[str, list[str]] = json.loads((work / "lexicon.json").read_text(encoding="utf-8"))
    return found


def train_judge(
    work: str | Path, steps: int, batch: int = 16, rate: float = 1.5e-3, device: str = "cpu"
) -> None:
    """Trains, or goes on training, and writes `work/judge.pt`.

    Args:
        work: holds the codec and the pools `train` and `validation`; receives `judge.jsonl`.
        steps: optimiser steps in all; the step size falls to zero at the last one.
        batch: utterances a step.
        rate: peak step size.
        device: "cpu" or "cuda".
    """
    work = Path(work)
    pool, held_out = open_pool(work, "train"), open_pool(work, "validation")
    codec = load_codec(work / "codec").to(device)
    phones = Phones(read_lexicon(work))
    torch.manual_seed(0)
    judge = Judge(len(phones.names)).to(device).train()
    optimiser = torch.optim.AdamW(judge.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.05)
    state_file = work / "judge.pt"
    step, seconds = 0, 0.0
    if state_file.exists():
        state = torch.load(state_file, map_location=device, weights_only=True)
        judge.load_state_dict(state["judge"])
        optimiser.load_state_dict(state["optimiser"])
        step, seconds = state["step"], state["seconds"]
    saved = began = time.time()
    recent: list[float] = []
    while step < steps:
        rise = min(1.0, (step + 1) / 100)
        optimiser.param_groups[0]["lr"] = rate * rise * min(1.0, 2 * (1 - step / steps))
        rows = np.random.default_rng((3, step)).integers(len(pool), size=batch)
        spectrum, lengths = _spectra(codec, pool, rows, device)
        targets = [phones.ids(pool.sentences[row]) for row in rows]
        with mixed_precision(device):
            found = judge(_mask(spectrum, step))
        loss = ctc_loss(
            found.transpose(0, 1),
            torch.tensor([k for row in targets for k in row], device=device),
            torch.tensor([length // 2 for length in lengths]),
            torch.tensor([len(row) for row in targets]),
            zero_infinity=True,
        )
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        optimiser.step()
        step += 1
        recent.append(loss.item())
        last = step == steps
        if step % 50 == 0 or last:
            line: dict[str, Any] = {"step": step, "loss": round(sum(recent) / len(recent), 4)}
            line["seconds"] = round(seconds + time.time() - began, 1)
            recent.clear()
            if step % 250 == 0 or last:
                judge.eval()
                count = len(held_out) if last else 40
                line |= measure_judge(judge.cpu(), codec.cpu(), held_out, phones, count)
                judge.train().to(device)
                codec.to(device)
            with (work / "judge.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        if last or time.time() - saved > _SAVED_EVERY:
            saved = time.time()
            state = {
                "judge": judge.state_dict(),
                "optimiser": optimiser.state_dict(),
                "step": step,
                "seconds": seconds + saved - began,
            }
            torch.save(state, state_file.with_suffix(".partial"))
            state_file.with_suffix(".partial").replace(state_file)


@torch.no_grad()
def _spectra(
    codec: SpeechCodec, pool: Pool, rows: np.ndarray, device: str
) -> tuple[Tensor, list[int]]:
    """Magnitudes [B, T, 321], the second half of the rows as the codec writes them; columns."""
    sounds = [torch.from_numpy(pool.utterance(row)) for row in rows.tolist()]
    lengths = [len(sound) // (2 * codec.hop) * 4 for sound in sounds]
    width = max(len(sound) for sound in sounds)
    width += -width % (2 * codec.hop)
    padded = torch.zeros(len(sounds), width)
    for k, sound in enumerate(sounds):
        padded[k, : len(sound)] = sound
    padded = padded.to(device)
    half = len(rows) // 2
    real = codec.target(padded[:half])
    features = codec.features(padded[half:])
    latents = codec.from_flat(codec.flat(codec.to_flat(features)))
    return torch.cat([real, codec.spectrum(latents).exp()]), lengths


def _mask(spectrum: Tensor, step: int) -> Tensor:
    """Loudness drawn for each row, and two silent spans of up to 80 ms."""
    rng = np.random.default_rng((4, step))
    count, width = spectrum.shape[:2]
    gains = torch.from_numpy(rng.uniform(0.5, 1.6, size=(count, 1, 1)).astype(np.float32))
    spectrum = spectrum * gains.to(spectrum.device)
    for row in range(count):
        for begin in rng.integers(width, size=2):
            spectrum[row, begin : begin + rng.integers(9)] = 0
    return spectrum


def load_judge(work: str | Path) -> tuple[Judge, Phones]:
    """The judge of a work folder in evaluation mode on the CPU, and its phonemes."""
    work = Path(work)
    phones = Phones(read_lexicon(work))
    judge = Judge(len(phones.names))
    state = torch.load(work / "judge.pt", map_location="cpu", weights_only=True)
    judge.load_state_dict(state["judge"])
    return judge.eval(), phones


def phone_errors(
    judge: Judge, phones: Phones, sounds: Sequence[Tensor], sentences: Sequence[Sequence[str]]
) -> float:
    """Phone error rate: edits between what is heard and what was to say, of all its phonemes."""
    edits = 0
    total = 0
    for sound, sentence in zip(sounds, sentences, strict=True):
        said = phones.ids(sentence)
        edits += edit_distance(judge.hear(sound), said)
        total += len(said)
    return edits / total


@torch.no_grad()
def measure_judge(
    judge: Judge, codec: SpeechCodec, pool: Pool, phones: Phones, count: int
) -> dict[str, float]:
    """Phone error rates of `count` utterances: as espeak made them, and through each layout."""
    real = [torch.from_numpy(pool.utterance(k)) for k in range(count)]
    flat = [codec.decode(codec.encode(sound[None]))[0] for sound in real]
    stacked = [codec.decode_stacked(codec.encode_stacked(sound[None]))[0] for sound in real]
    figures = {}
    for name, sounds in (("real", real), ("flat", flat), ("stacked", stacked)):
        errors = phone_errors(judge, phones, sounds, pool.sentences[:count])
        figures[f"errors {name}"] = round(errors, 4)
    return figures
