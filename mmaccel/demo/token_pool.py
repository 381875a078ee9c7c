"""Pictures of a pool as tokens, and batches of caption and picture tokens for the generator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmaccel.demo.picture_pool import open_pool
from mmaccel.demo.scenes_words import CaptionWords, split_words
from mmaccel.demo.train_tokenizer import as_float
from mmaccel.tokenizers_vq.load import load_tokenizer

IGNORE = -100


def encode_pool(work: str | Path, name: str, device: str = "cpu") -> None:
    """Encodes `name.npy` with the tokenizer in `work` into `name.tokens.npy`, int16 [N, 256]."""
    work = Path(work)
    target = work / f"{name}.tokens.npy"
    if target.exists():
        return
    tokenizer = load_tokenizer(work / "tokenizer").to(device)
    pictures, _ = open_pool(work, name)
    tokens = [
        tokenizer.encode(as_float(pictures[s : s + 200], device)).to("cpu", torch.int16).numpy()
        for s in range(0, len(pictures), 200)
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
        emphasis: how often per epoch a picture comes whose caption says `left` or `right`, the
            hardest ones; every other comes once. It changes which captions are seen, not the law
            of pictures given a caption.
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
            ids [B, T] and labels [B, T], int64; labels are `IGNORE` everywhere but on picture
            tokens. Rows are padded on the right.
        """
        epoch, k = divmod(step, len(self._entries) // size)
        rows = self._epoch(epoch)[k * size : (k + 1) * size]
        dropped = np.random.default_rng((self.seed, 1, step)).random(size) < self.drop
        prompts = [
            self.words.unconditional() if gone else self.prompts[row]
            for row, gone in zip(rows, dropped, strict=True)
        ]
        return self.pack(prompts, self.tokens[rows], width)

    def distinct(self, steps: int, size: int) -> int:
        """How many different pictures the first `steps` batches of `size` hold."""
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
        self, prompts: list[list[int]], tokens: np.ndarray, width: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Joins prompts and picture tokens [B, 256] into ids and labels [B, T]."""
        n_tokens = tokens.shape[1]
        width = width or max(map(len, prompts)) + n_tokens
        ids = torch.full((len(prompts), width), self.words.pad)
        labels = torch.full((len(prompts), width), IGNORE)
        picture = torch.from_numpy(tokens.astype(np.int64))
        for b, prompt in enumerate(prompts):
            n = len(prompt)
            ids[b, :n] = torch.tensor(prompt)
            ids[b, n : n + n_tokens] = labels[b, n : n + n_tokens] = picture[b]
        return ids, labels
