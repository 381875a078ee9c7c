"""`voices-masked`: OmniVoice's layout over the stacked codes of `voices`, 4 books every 40 ms.

H. Zhu et al., "OmniVoice", 2026, arXiv 2604.00688: a Qwen3 that attends both ways, one
position a frame, a head a book, the text left out in one row of ten for guidance.

Departures: the text is phonemes, which stand beside the frames, at positions spread evenly over
theirs, and not before them, as a network this small then learns in an hour; the losses of a row's
hidden codes weigh as much together whatever their number, which is drawn with a density that rises
with it; later books are hidden rather than earlier ones, by a tilt drawn for each row, of which 0
is the published order; no prompts of sound; the length of a canvas is the sum of durations of the
text's tokens. Validation is without weights, densities and drawn tilts, as a bound needs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmaccel.pipelines.hosts.diffusion_lm.speech_network import SpeechNetwork
from mmaccel.pipelines.models.voices_vocabulary import list_tokens
from scripts.training.loop import IGNORE, Batch, Plan, Task
from scripts.training.masking import draw_counts
from scripts.training.voices import SpokenText
from scripts.training.voices_data import Pool
from scripts.training.voices_words import SPEAKERS

PLAN = Plan(4000, 1300, 20, mixed=True)
LLM: dict[str, Any] = dict(
    hidden_size=160, intermediate_size=320, num_hidden_layers=5, num_attention_heads=5,
    num_key_value_heads=5, head_dim=32, max_position_embeddings=512,
)  # fmt: skip
_DROPPED = 0.1
_TILT = 3.0  # of the logarithm of odds that a later book is hidden rather than the one before
_POWER = 0.5  # of a number in 0..1: what share of a row training hides, two thirds on average
_WEIGHTS = (4.0, 3.0, 2.0, 1.0)  # of books in training
_TRAIN, _CHECK, _DROP = 1, 2, 3
_NO_TEXT = -1


class MaskedSpeech(Task):
    """Utterances whose codes are hidden in part; `checks` validation utterances."""

    def __init__(
        self, text: SpokenText, held_out: SpokenText, first: int, size: int, checks: int = 400
    ) -> None:
        self.text, self.first, self.mask = text, first, size
        firsts = range(0, checks, 20)
        self.checks = [self.pack(held_out, np.arange(k, k + 20)) for k in firsts]

    def build(self, before: Path | None) -> SpeechNetwork:
        from transformers import Qwen3Config, Qwen3Model

        vocab_size = self.text.vocab_size - self.first
        books = self.text.codes[0].shape[1] - 2
        return SpeechNetwork(
            Qwen3Model(Qwen3Config(vocab_size=vocab_size, **LLM)),
            books,
            self.mask + 1,
            spreads_text=True,
        )

    def batch(self, step: int, size: int) -> Batch:
        ids, labels = self.pack(self.text, self.text.rows(step, size))
        is_dropped = np.random.default_rng((_DROP, step)).random(size) < _DROPPED
        ids[torch.from_numpy(is_dropped), :, 0] = _NO_TEXT
        return ids, labels

    def pack(self, text: SpokenText, rows: np.ndarray) -> Batch:
        """Texts on the right of P columns, then frames on the left of T: ids `[B, P + T, 1 + Q]`,
        text or `_NO_TEXT` and codes, and labels `[B, T, Q]`.
        """
        prompts = [text.prompts[row] for row in rows]
        codes = [text.codes[row][:, 2:] for row in rows]
        before, after = max(map(len, prompts)), max(map(len, codes))
        ids = torch.zeros(len(rows), before + after, 1 + codes[0].shape[1], dtype=torch.int64)
        ids[..., 0] = _NO_TEXT
        labels = torch.full_like(ids[:, before:, 1:], IGNORE)
        for k, (prompt, frames) in enumerate(zip(prompts, codes, strict=True)):
            ids[k, before - len(prompt) : before, 0] = torch.tensor(prompt) - self.first
            ids[k, before : before + len(frames), 1:] = frames
            labels[k, : len(frames)] = frames
        return ids, labels

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        """As `bound`, with a tilt drawn for each row, more slots hidden, and books weighted."""
        rng = np.random.default_rng((_TRAIN, step))
        tilts = rng.uniform(0, _TILT, len(ids))
        losses, books = self.hidden_losses(model, ids, labels, rng, tilts, _POWER)
        weights = losses.new_tensor(_WEIGHTS) * len(_WEIGHTS) / sum(_WEIGHTS)
        return (losses * weights[books]).sum()

    def validate(self, model: Any, device: str) -> dict[str, float]:
        """`bound` in the orders of each tilt."""
        found: dict[str, list[Tensor]] = {"validation": [], "in_order": []}
        for k, (ids, labels) in enumerate(self.checks):
            for name, tilt in (("validation", 0.0), ("in_order", _TILT)):
                rng = np.random.default_rng((_CHECK, k))
                found[name].append(self.bound(model, ids.to(device), labels.to(device), rng, tilt))
        return {name: float(torch.stack(losses).mean()) for name, losses in found.items()}

    def bound(
        self, model: Any, ids: Tensor, labels: Tensor, rng: np.random.Generator, tilt: float
    ) -> Tensor:
        """As `Masked.bound`: on the negative log-likelihood of a code, in nats, the mean loss of
        decoding one slot a step in an order that prefers earlier books by `tilt`.
        """
        tilts = np.full(len(ids), tilt)
        return self.hidden_losses(model, ids, labels, rng, tilts)[0].sum()

    def hidden_losses(
        self,
        model: Any,
        ids: Tensor,
        labels: Tensor,
        rng: np.random.Generator,
        tilts: np.ndarray,
        power: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Of the N slots that are hidden, the share `[N]` of the mean over a row's slots and then
        over rows, and their books `[N]`.
        """
        slots = labels != IGNORE  # [B, T, Q]
        counts = draw_counts(rng, len(ids), slots.flatten(1).sum(1).cpu().numpy(), power)
        hidden = hide_books(slots, counts, rng, tilts)
        frames = ids[:, -slots.shape[1] :, 1:].masked_fill(hidden, self.mask)
        text = ids[:, : -slots.shape[1], 0]
        is_there = torch.cat([text != _NO_TEXT, slots.any(-1)], 1)
        states = model.states(text.clamp(min=0), frames, is_there)
        losses, books = [], []
        each = torch.from_numpy(counts * len(ids)).to(states.device)
        for book, weight in enumerate(model.audio_heads.weight.chunk(slots.shape[2])):
            chosen = hidden[..., book]
            logits = torch.nn.functional.linear(states[chosen], weight).float()
            own = cross_entropy(logits, labels[..., book][chosen], reduction="none")
            losses.append(own / each[chosen.nonzero()[:, 0]])
            books.append(torch.full_like(chosen.nonzero()[:, 0], book))
        return torch.cat(losses), torch.cat(books)

    def save(self, model: Any, folder: Path) -> None:
        """In the published names, in float16."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: tensor.half() if tensor.is_floating_point() else tensor
            for name, tensor in model.state_dict().items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = {
            "architectures": ["OmniVoice"],
            "model_type": "omnivoice",
            "audio_vocab_size": model.size,
            "audio_mask_id": self.mask,
            "num_audio_codebook": model.books,
            "spreads_text": model.spreads_text,
            "llm_config": {"model_type": "qwen3", "vocab_size": model.llm.config.vocab_size, **LLM},
        }
        file = folder / "config.json"
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def hide_books(
    slots: Tensor, counts: np.ndarray, rng: np.random.Generator, tilts: np.ndarray
) -> Tensor:
    """Of each row `counts[b]` of the slots `[B, T, Q]` bool that may be hidden: those that come
    last in an order by Gumbel noise and `tilts` `[B]` times the book.
    """
    keys = -rng.gumbel(size=tuple(slots.shape))
    keys -= tilts[:, None, None] * np.arange(slots.shape[-1])
    keys[~slots.cpu().numpy()] = np.inf
    ranks = keys.reshape(len(keys), -1).argsort(axis=1).argsort(axis=1)
    hidden = ranks < counts[:, None]
    return torch.from_numpy(hidden.reshape(slots.shape)).to(slots.device)


def fit_durations(pool: Pool, text: SpokenText, first: int) -> dict[str, float]:
    """Frames that each token of text adds to a canvas, by least squares over a pool; tokens that it
    does not have are left out.
    """
    lengths = np.array([len(codes) for codes in text.codes], dtype=np.float64)
    counts = np.zeros((len(pool), text.vocab_size))
    for row, prompt in enumerate(text.prompts):
        np.add.at(counts[row], prompt, 1)
    used = np.flatnonzero(counts.any(0))
    fitted = np.linalg.lstsq(counts[:, used], lengths, rcond=None)[0]
    names = list_tokens(first, SPEAKERS, pool.lexicon)
    return {names[k]: round(float(frames), 3) for k, frames in zip(used, fitted, strict=True)}
