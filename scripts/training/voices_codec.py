"""Trains the codec of `voices` on magnitudes of short-time spectra, without an adversary.

R. Yamamoto, E. Song, J.-M. Kim, "Parallel WaveGAN", 2019 (arXiv 1910.11480), equation 6: spectral
convergence and L1 of log magnitudes, and L1 of log mel spectrograms. Departures: one resolution, as
the decoder writes magnitudes, not sound. Half of each batch takes the flat layout, half the stacked
one, whose rows use a random number of books half of the time.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.batch.manifest import sha256_of
from mmaccel.errors import OptionError
from mmaccel.tokenizers_vq.mel import LogMel, mel_filters
from mmaccel.tokenizers_vq.speech_codec import SpeechCodec, load_codec, save_codec
from scripts.training.optim import mixed_precision
from scripts.training.voices_data import Pool, open_pool

CODEC_CONFIG: dict[str, Any] = {
    "sample_rate": 16_000,
    "hop": 320,
    "levels": [5, 5, 5, 4, 4],
    "books": 4,
    "book_levels": [5, 5, 5, 4],
    "encoder_width": 96,
    "encoder_depth": 3,
    "decoder_width": 128,
    "decoder_depth": 2,
    "fine_depth": 4,
}
_BANDS = 60
_FLOOR = 1e-2  # added to magnitudes, whose noise is at about 0.1
_SEGMENT = 12_800
_MEL_WEIGHT = 4.0
_SAVED_EVERY = 120.0


class SpectralLoss(torch.nn.Module):
    """Distance of logarithms of magnitudes to magnitudes, both of one codec."""

    filters: Tensor

    def __init__(self, codec: SpeechCodec) -> None:
        super().__init__()
        filters = mel_filters(_BANDS, codec.n_fft, codec.sample_rate)
        self.register_buffer("filters", filters.T.contiguous())

    def forward(self, logs: Tensor, real: Tensor) -> Tensor:
        """[B, T, bins] twice to a scalar."""
        made = logs.exp()
        convergence = (real - made).norm() / real.norm()
        fine = ((made + _FLOOR).log() - (real + _FLOOR).log()).abs().mean()
        one, other = made @ self.filters, real @ self.filters
        mel = ((one + _FLOOR / 10).log() - (other + _FLOOR / 10).log()).abs().mean()
        return convergence + fine + _MEL_WEIGHT * mel


def draw_segments(pool: Pool, seed: tuple[int, int], count: int) -> Tensor:
    """[count, samples] float32: random places of the pool, at random loudness."""
    rng = np.random.default_rng(seed)
    begins = rng.integers(len(pool.sound) - _SEGMENT, size=count)
    rows = np.stack([pool.sound[begin : begin + _SEGMENT] for begin in begins])
    gains = rng.uniform(0.6, 1.3, size=(count, 1)).astype(np.float32) / 32768
    return torch.from_numpy(rows.astype(np.float32) * gains)


def mel_distance(made: Tensor, real: Tensor) -> float:
    """Mean absolute difference of log mel spectrograms (80 bands, 16 ms), in nats."""
    mel = LogMel(16_000, 256)
    return float((mel(made) - mel(real)).abs().mean())


def train_codec(
    work: str | Path, steps: int, batch: int = 12, rate: float = 1e-3, device: str = "cpu"
) -> None:
    """Trains, or goes on training, and writes `work/codec/`.

    Args:
        work: holds the pools `codec` and `validation`; receives `codec.jsonl` and `codec.pt`.
        steps: optimiser steps in all; the step size falls to zero at the last one.
        batch: seconds of sound a step.
        rate: peak step size.
        device: "cpu" or "cuda".
    """
    work = Path(work)
    pool = open_pool(work, "codec")
    held_out = open_pool(work, "validation")
    checked = draw_segments(held_out, (0, 0), 24)
    torch.manual_seed(0)
    codec = SpeechCodec(**CODEC_CONFIG).to(device).train()
    distance = SpectralLoss(codec).to(device)
    optimiser = torch.optim.AdamW(codec.parameters(), rate, betas=(0.8, 0.98), weight_decay=0.01)
    state_file = work / "codec.pt"
    step, seconds = 0, 0.0
    if state_file.exists():
        state = torch.load(state_file, map_location=device, weights_only=True)
        codec.load_state_dict(state["codec"])
        optimiser.load_state_dict(state["optimiser"])
        step, seconds = state["step"], state["seconds"]
    saved = began = time.time()
    recent: list[float] = []
    flat = torch.arange(batch, device=device) % 2 == 0
    while step < steps:
        rise = min(1.0, (step + 1) / 200)
        optimiser.param_groups[0]["lr"] = rate * rise * min(1.0, 2 * (1 - step / steps))
        real = draw_segments(pool, (1, step), batch).to(device)
        rng = np.random.default_rng((2, step))
        kept = np.where(
            rng.random(batch) < 0.5, rng.integers(1, codec.books + 1, size=batch), codec.books
        )
        with mixed_precision(device):
            made = codec(real, flat, torch.from_numpy(kept).to(device))
        loss = distance(made, codec.target(real))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(codec.parameters(), 1.0)
        optimiser.step()
        step += 1
        recent.append(loss.item())
        last = step == steps
        if step % 50 == 0 or last:
            line: dict[str, Any] = {"step": step, "loss": round(sum(recent) / len(recent), 4)}
            line["seconds"] = round(seconds + time.time() - began, 1)
            recent.clear()
            if step % 500 == 0 or last:
                line |= _check(codec, checked, device)
            with (work / "codec.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        if last or time.time() - saved > _SAVED_EVERY:
            saved = time.time()
            state = {
                "codec": codec.state_dict(),
                "optimiser": optimiser.state_dict(),
                "step": step,
                "seconds": seconds + saved - began,
            }
            torch.save(state, state_file.with_suffix(".partial"))
            state_file.with_suffix(".partial").replace(state_file)
            save_codec(codec, CODEC_CONFIG, work / "codec")


def _check(codec: SpeechCodec, real: Tensor, device: str) -> dict[str, float]:
    codec.eval()
    sound = real.to(device)
    codes = codec.encode(sound)
    stacked = codec.encode_stacked(sound)
    figures = {
        "mel flat": mel_distance(codec.decode(codes).cpu(), real),
        "mel stacked": mel_distance(codec.decode_stacked(stacked).cpu(), real),
        "codes": float(codes.unique().numel()),
    }
    codec.train()
    return {name: round(value, 4) for name, value in figures.items()}


def encode_pool(work: str | Path, name: str, device: str = "cpu") -> None:
    """Encodes a pool into `name.codes.npy`: both layouts, one utterance after the other.

    Columns of [F / 2, 2 + Q] int16: two flat codes of 20 ms, then the books of the same 40 ms.

    Raises:
        OptionError: the folder has codes of another codec.
    """
    work = Path(work)
    target = work / f"{name}.codes.npy"
    made_by = work / f"{name}.codes.sha256"
    own = sha256_of(work / "codec" / "codec.safetensors")
    if target.exists():
        known = made_by.read_text(encoding="utf-8")
        if known != own:
            raise OptionError(
                f"codes: expected those of the codec in {work / 'codec'} in {target}, received "
                f"those of another; delete {name}.codes.* and what was trained on them"
            )
        return
    codec = load_codec(work / "codec").to(device)
    pool = open_pool(work, name)
    rows = []
    ends = []
    total = 0
    for index in range(len(pool)):
        sound = torch.from_numpy(pool.utterance(index))[None].to(device)
        features = codec.features(sound)
        flat = codec.flat.encode(codec.to_flat(features))[0].view(-1, 2)
        stacked = codec.encode_features(features)[0]
        rows.append(torch.cat([flat, stacked], 1).to("cpu", torch.int16).numpy())
        total += len(rows[-1])
        ends.append(total)
    np.save(work / f"{name}.code_ends.npy", np.array(ends))
    made_by.write_text(own, encoding="utf-8")
    partial = work / f"{name}.codes.partial.npy"
    np.save(partial, np.concatenate(rows))
    partial.replace(target)
