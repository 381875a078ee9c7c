"""Training data on disk: images drawn once, the same as tokens, and batches of both with captions.

Drawing costs more than encoding, so training reads images (and later tokens) that were made once.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmaccel.demo.scenes.data import CaptionWords, make_scenes
from mmaccel.pipelines.models.scenes_vocabulary import split_words
from mmaccel.tokenizers_vq.autoencoder import load_tokenizer

_CHUNK = 250


def _draw_chunk(job: tuple[int, int, int]) -> tuple[int, np.ndarray, list[str]]:
    import torch

    torch.set_num_threads(1)
    seed, start, stop = job
    _, captions, images = make_scenes(seed, range(start, stop))
    return start, images.numpy(), captions


def make_pool(folder: str | Path, name: str, seed: int, count: int, workers: int = 2) -> None:
    """Draws images 0..count-1 of `seed` into `name.npy` and `name.captions.json`.

    Args:
        folder: made where missing.
        name: stem of the two files; existing complete files stay.
        seed: which collection.
        count: number of images.
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
        for start, images, words in processes.imap_unordered(_draw_chunk, jobs):
            pool[start : start + len(words)] = images
            captions[start : start + len(words)] = words
    pool.flush()
    captions_file.write_text(json.dumps(captions), encoding="utf-8")


def open_pool(folder: str | Path, name: str) -> tuple[np.ndarray, list[str]]:
    """Opens a pool: images [N, 3, 64, 64] uint8 (memory-mapped) and captions."""
    folder = Path(folder)
    captions = json.loads((folder / f"{name}.captions.json").read_text(encoding="utf-8"))
    return np.load(folder / f"{name}.npy", mmap_mode="r"), captions


def as_float(images: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """uint8 images to float32 in 0..1."""
    return torch.from_numpy(np.array(images)).to(device).float() / 255


IGNORE = -100


def encode_pool(work: str | Path, name: str, device: str = "cpu") -> None:
    """Encodes `name.npy` with the tokenizer in `work` into `name.tokens.npy`, int16 [N, 256]."""
    work = Path(work)
    target = work / f"{name}.tokens.npy"
    if target.exists():
        return
    tokenizer = load_tokenizer(work / "tokenizer").to(device)
    images, _ = open_pool(work, name)
    tokens = [
        tokenizer.encode(as_float(images[s : s + 200], device)).to("cpu", torch.int16).numpy()
        for s in range(0, len(images), 200)
    ]
    partial = work / f"{name}.partial.npy"
    np.save(partial, np.concatenate(tokens))
    partial.replace(target)


class TokenPool:
    """Batches drawn without replacement, epoch by epoch, in an order fixed by the seed.

    Args:
        work: folder of the pool.
        name: the pool.
        words: turns captions into ids.
        drop: share of captions replaced by the empty caption.
        emphasis: how often per epoch an image comes whose caption says `left` or `right`, the
            hardest ones; every other comes once. It changes which captions are seen, not the
            distribution of images given a caption.
        seed: fixes order and dropping.
    """

    def __init__(
        self,
        work: str | Path,
        name: str,
        words: CaptionWords,
        drop: float = 0.1,
        emphasis: int = 1,
        seed: int = 0,
    ) -> None:
        _, captions = open_pool(work, name)
        self.tokens = np.load(Path(work) / f"{name}.tokens.npy")
        self.prompts = [words.encode(c) for c in captions]
        self.words, self.drop, self.seed = words, drop, seed
        hard = [bool({"left", "right"} & set(split_words(c))) for c in captions]
        self._entries = np.repeat(np.arange(len(captions)), np.where(hard, emphasis, 1))
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, step: int, size: int, width: int | None = None) -> tuple[Tensor, Tensor]:
        """Batch number `step`.

        Args:
            step: from 0; a given step gives the same batch whenever it is asked for.
            size: B.
            width: T; the longest row of the batch where not given.

        Returns:
            ids [B, T] and labels [B, T], int64; labels are `IGNORE` everywhere but on image
            tokens. Rows are padded on the right.
        """
        epoch, k = divmod(step, len(self._entries) // size)
        rows = self._epoch(epoch)[k * size : (k + 1) * size]
        dropped = np.random.default_rng((self.seed, 1, step)).random(size) < self.drop
        prompts = [
            self.words.unconditional() if gone else self.prompts[row]
            for row, gone in zip(rows, dropped, strict=True)
        ]
        return pack(prompts, self.tokens[rows], self.words.pad, width)

    def distinct(self, steps: int, size: int) -> int:
        """How many different images the first `steps` batches of `size` hold."""
        epochs, k = divmod(steps, len(self._entries) // size)
        return len(self.prompts) if epochs else len(np.unique(self._epoch(0)[: k * size]))

    def _epoch(self, epoch: int) -> np.ndarray:
        if self._order[0] != epoch:
            rng = np.random.default_rng((self.seed, epoch))
            self._order = (epoch, rng.permutation(self._entries))
        return self._order[1]

    @property
    def width(self) -> int:
        """Length of the longest row of the pool."""
        return max(map(len, self.prompts)) + self.tokens.shape[1]


def pack(
    prompts: list[list[int]], tokens: np.ndarray, pad: int, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Joins prompts and what they ask for.

    Args:
        prompts: B lists of ids.
        tokens: [B, n] of images or clips.
        pad: id that fills rows on the right.
        width: T; the longest row where not given.

    Returns:
        ids [B, T] and labels [B, T], int64; labels are `IGNORE` everywhere but on `tokens`.
    """
    n_tokens = tokens.shape[1]
    width = width or max(map(len, prompts)) + n_tokens
    ids = torch.full((len(prompts), width), pad)
    labels = torch.full((len(prompts), width), IGNORE)
    drawn = torch.from_numpy(tokens.astype(np.int64))
    for b, prompt in enumerate(prompts):
        n = len(prompt)
        ids[b, :n] = torch.tensor(prompt)
        ids[b, n : n + n_tokens] = labels[b, n : n + n_tokens] = drawn[b]
    return ids, labels
