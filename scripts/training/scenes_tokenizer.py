"""Trains the image tokenizer of `scenes` by weighted squared error.

Finite scalar quantization needs no auxiliary loss (arXiv 2309.15505, section 3), so the
objective is the reconstruction error alone, weighted towards the objects, because a caption
speaks of them and the ground is most of the image: AdamW, a one-cycle learning rate, bfloat16
autocast.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from mmaccel.demo.scenes.data import TOKENIZER_SEED, VALIDATION_SEED
from mmaccel.tokenizers_vq.autoencoder import ImageTokenizer, save_tokenizer
from scripts.training.data import as_float, make_pool, open_pool
from scripts.training.optim import mixed_precision

TOKENIZER_CONFIG: dict[str, Any] = {
    "size": 64,
    "levels": [8, 5, 5, 5],
    "encoder_width": 96,
    "encoder_depth": 2,
    "decoder_width": 128,
    "decoder_depth": 3,
    "fine_width": 32,
    "fine_depth": 1,
}


def psnr(tokenizer: ImageTokenizer, images: np.ndarray) -> float:
    """Peak signal-to-noise ratio of reconstructions in decibels, of the mean error of all images.

    Args:
        tokenizer: encodes and decodes.
        images: [N, 3, 64, 64] uint8.
    """
    errors = []
    for start in range(0, len(images), 100):
        real = as_float(images[start : start + 100])
        again = tokenizer.decode(tokenizer.encode(real)).clamp(0, 1)
        errors.append((again - real).square().mean((1, 2, 3)))
    return -10 * math.log10(float(torch.cat(errors).mean()))


def object_weight(images: Tensor, gain: float = 3.0) -> Tensor:
    """Weights that make outlines count: 1 + gain within two pixels of an object, else 1; mean 1.

    Args:
        images: [B, 3, h, w] float in 0..1.
        gain: what objects count more.

    Returns:
        [B, 1, h, w] float32.
    """
    light, dark = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    solid = (
        (light - dark > 0.5) | (dark > 0.8)
    ).float()  # the vivid and the white; grounds are neither
    near = max_pool2d(solid, 5, stride=1, padding=2)
    weight = 1 + gain * near
    return weight / weight.mean()


def train_tokenizer(
    work: str | Path,
    steps: int = 2000,
    batch: int = 64,
    pool: int = 24000,
    rate: float = 1.6e-3,
    device: str = "cpu",
) -> None:
    """Trains and writes `work/tokenizer/`.

    Args:
        work: folder for pools, log and result.
        steps: optimiser steps.
        batch: images per step.
        pool: distinct training images.
        rate: peak learning rate.
        device: "cpu" or "cuda".
    """
    work = Path(work)
    make_pool(work, "tokenizer_pool", TOKENIZER_SEED, pool)
    make_pool(work, "validation", VALIDATION_SEED, 2000)
    images, _ = open_pool(work, "tokenizer_pool")
    held_out, _ = open_pool(work, "validation")
    fit_tokenizer(
        work,
        TOKENIZER_CONFIG,
        images,
        held_out[:400],
        steps=steps,
        batch=batch,
        rate=rate,
        device=device,
    )


def fit_tokenizer(
    work: Path,
    config: dict[str, Any],
    images: np.ndarray,
    held_out: np.ndarray,
    steps: int,
    batch: int,
    rate: float,
    device: str = "cpu",
) -> None:
    """Trains a tokenizer on images and writes `work/tokenizer/` and `work/tokenizer.jsonl`.

    Args:
        work: receives log and result.
        config: arguments of `ImageTokenizer`.
        images: [N, 3, size, size] uint8.
        held_out: others, for the log.
        steps, batch, rate, device: see `train_tokenizer`.
    """
    torch.manual_seed(0)
    tokenizer = ImageTokenizer(**config).to(device)
    optimiser = torch.optim.AdamW(
        tokenizer.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.05)
    order = np.random.default_rng(0)
    began = time.time()
    with (work / "tokenizer.jsonl").open("a", encoding="utf-8") as log:
        for step in range(1, steps + 1):
            real = as_float(
                images[np.sort(order.choice(len(images), batch, replace=False))], device
            )
            with mixed_precision(device):
                again = tokenizer(real)
            loss = (object_weight(real) * (again.float() - real).square()).mean()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(tokenizer.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            if step % 100 == 0 or step == steps:
                tokenizer.eval().cpu()
                line = {"step": step, "loss": loss.item(), "seconds": round(time.time() - began, 1)}
                line["psnr"] = round(psnr(tokenizer, held_out), 3)
                log.write(json.dumps(line) + "\n")
                log.flush()
                save_tokenizer(tokenizer, config, work / "tokenizer")
                tokenizer.train().to(device)
