"""`voices`, a small Llama over phonemes and speech codes: its model and its training task.

One stream of codes as in Z. Ye et al., "Llasa: Scaling Train-Time and Inference-Time Compute for
Llama-based Speech Synthesis", 2025 (arXiv 2502.04128), by way of transformers' `LlamaForCausalLM`.
Departures: the text is phonemes; the codec is `mmaccel.tokenizers_vq.speech_codec`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmaccel.demo.voices.words import SPEAKERS
from mmaccel.pipelines.models.voices_vocabulary import END, PAD, list_prompt, list_tokens
from mmaccel.tokenizers_vq.speech_codec import load_codec
from scripts.training.data import IGNORE
from scripts.training.generator import read_weights

WIDTH, DEPTH, HEADS, INNER = 192, 5, 3, 512
LONGEST = 512
"""Positions: a prompt and about eight seconds."""
_GROUP = 16  # batches whose rows are sorted by length together


class SpokenText:
    """Prompts and codes of a pool, in batches of rows of like length, epoch by epoch.

    Args:
        work: holds `lexicon.json`, the pool and its codes.
        name: of the pool.
        codes: codes of the flat layout.
        seed: fixes the order.
    """

    def __init__(self, work: str | Path, name: str, codes: int, seed: int = 0) -> None:
        work = Path(work)
        lexicon = json.loads((work / "lexicon.json").read_text(encoding="utf-8"))
        found = json.loads((work / f"{name}.json").read_text(encoding="utf-8"))
        tokens = list_tokens(codes, SPEAKERS, lexicon)
        self.ids = {token: k for k, token in enumerate(tokens)}
        self.vocab_size = len(tokens)
        self.pad = self.ids[PAD]
        self.end = self.ids[END]
        self.prompts = []
        for sentence, speaker in zip(found["sentences"], found["speakers"], strict=True):
            names = list_prompt(SPEAKERS[speaker], [lexicon[word] for word in sentence])
            self.prompts.append([self.ids[token] for token in names])
        self.codes = np.load(work / f"{name}.codes.npy")
        self.ends = np.load(work / f"{name}.code_ends.npy")
        self.seed = seed
        lengths = np.diff(self.ends, prepend=0) * 2
        self.lengths = lengths + np.array([len(prompt) for prompt in self.prompts])
        self._order: tuple[int, int, np.ndarray] = (-1, 0, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.prompts)

    def frames(self, index: int) -> np.ndarray:
        """Codes of an utterance in both layouts, [F / 2, 2 + Q]; see `encode_pool`."""
        begin = self.ends[index - 1] if index else 0
        return self.codes[begin : self.ends[index]]

    def rows(self, step: int, size: int) -> np.ndarray:
        """[size] utterances of batch `step`."""
        epoch, k = divmod(step, len(self) // size)
        if self._order[:2] != (epoch, size):
            self._order = (epoch, size, self._shuffle(epoch, size))
        found: np.ndarray = self._order[2][k]
        return found

    def _shuffle(self, epoch: int, size: int) -> np.ndarray:
        """[batches, size]: shuffled rows, groups of them sorted by length, shuffled batches."""
        rng = np.random.default_rng((self.seed, epoch))
        rows = rng.permutation(len(self))
        for begin in range(0, len(rows), _GROUP * size):
            group = rows[begin : begin + _GROUP * size]
            group[:] = group[np.argsort(self.lengths[group], kind="stable")]
        batches = rows[: len(rows) // size * size].reshape(-1, size)
        return rng.permutation(batches)

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """ids and labels [size, T]; labels are `IGNORE` but on codes and the end."""
        return self.pack(self.rows(step, size))

    def pack(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Prompts, flat codes and end tokens of some utterances; see `batch`."""
        width = int(self.lengths[rows].max()) + 1
        ids = torch.full((len(rows), width), self.pad)
        labels = torch.full((len(rows), width), IGNORE)
        for b, row in enumerate(rows.tolist()):
            prompt = self.prompts[row]
            codes = self.frames(row)[:, :2].reshape(-1).astype(np.int64)
            n = len(prompt)
            end = n + len(codes)
            ids[b, :n] = torch.tensor(prompt)
            ids[b, n:end] = labels[b, n:end] = torch.from_numpy(codes)
            ids[b, end] = labels[b, end] = self.end
        return ids, labels


def build_model(vocab_size: int, end: int, pad: int) -> Any:
    """A new `LlamaForCausalLM` with random weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=LONGEST,
            tie_word_embeddings=True,
            initializer_range=0.02,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=pad,
        )
    )


def code_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of codes and end tokens, in nats."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    target = labels[:, 1:]
    chosen = target != IGNORE
    return cross_entropy(model.lm_head(hidden[chosen]).float(), target[chosen])


class Voices:
    """Utterances of a work folder, read code by code; see `scripts.training.generator.Task`.

    Args:
        work: of `python -m scripts.training voices-data`.
        checks: validation utterances, in batches of 20.
    """

    def __init__(self, work: str | Path, checks: int = 400) -> None:
        self.options: dict[str, Any] = {}
        codes = load_codec(Path(work) / "codec").flat_size
        self.data = SpokenText(work, "train", codes)
        held_out = SpokenText(work, "validation", codes)
        self.checks = [held_out.pack(np.arange(k, k + 20)) for k in range(0, checks, 20)]

    def build(self, start: str | None) -> Any:
        """See `Task`."""
        model = build_model(self.data.vocab_size, self.data.end, self.data.pad)
        if start is not None:
            model.load_state_dict(read_weights(start))
        return model

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """See `Task`."""
        return self.data.batch(step, size)

    def distinct(self, steps: int, size: int) -> int:
        """See `Task`."""
        return min(steps * size, len(self.data))

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        """See `Task`."""
        return code_loss(model, ids, labels)

    @torch.no_grad()
    def validate(self, model: Any, device: str) -> dict[str, float]:
        """See `Task`: nats a code, the mean over all codes and ends."""
        model.eval()
        total = 0.0
        count = 0
        for ids, labels in self.checks:
            here = int((labels[:, 1:] != IGNORE).sum())
            total += float(code_loss(model, ids.to(device), labels.to(device))) * here
            count += here
        model.train()
        return {"validation": total / count}
