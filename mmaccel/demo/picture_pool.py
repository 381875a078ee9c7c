"""Pictures drawn beforehand, kept as one array on disk.

Drawing costs more than encoding, so training reads pictures (and later tokens) that were made once.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import numpy as np

from mmaccel.demo.scenes_data import make_scenes

_CHUNK = 250


def _draw_chunk(job: tuple[int, int, int]) -> tuple[int, np.ndarray, list[str]]:
    import torch

    torch.set_num_threads(1)
    seed, start, stop = job
    _, captions, pictures = make_scenes(seed, range(start, stop))
    return start, pictures.numpy(), captions


def make_pool(folder: str | Path, name: str, seed: int, count: int, workers: int = 2) -> None:
    """Draws pictures 0..count-1 of `seed` into `name.npy` and `name.captions.json`.

    Args:
        folder: made where missing.
        name: stem of the two files; existing complete files are kept.
        seed: which collection.
        count: number of pictures.
        workers: processes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    captions_file = folder / f"{name}.captions.json"
    if captions_file.exists():
        return
    pool = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.uint8, (count, 3, 64, 64))
    captions: list[str] = [""] * count
    jobs = [(seed, s, min(s + _CHUNK, count)) for s in range(0, count, _CHUNK)]
    with multiprocessing.get_context("spawn").Pool(workers) as processes:
        for start, pictures, words in processes.imap_unordered(_draw_chunk, jobs):
            pool[start : start + len(words)] = pictures
            captions[start : start + len(words)] = words
    pool.flush()
    captions_file.write_text(json.dumps(captions), encoding="utf-8")


def open_pool(folder: str | Path, name: str) -> tuple[np.ndarray, list[str]]:
    """Opens a pool: pictures [N, 3, 64, 64] uint8 (memory-mapped) and captions."""
    folder = Path(folder)
    captions = json.loads((folder / f"{name}.captions.json").read_text(encoding="utf-8"))
    return np.load(folder / f"{name}.npy", mmap_mode="r"), captions
