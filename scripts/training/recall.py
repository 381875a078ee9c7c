"""`recall`, a small `LlamaForCausalLM` that answers questions about long documents.

Three stages, each of which begins from the one before: `short`, `middle` and `long` documents. What
is learnt on short ones holds on long ones, because positions skip ahead between statements, up to
the longest text (D. Zhu et al., "PoSE: Efficient Context Window Extension of LLMs via Positional
Skip-wise Training", 2023, arXiv:2309.10400). Departure: a document has several skips, at random
places between statements, as each statement has to stay whole.

All questions about a document follow it in one sequence. Losses are those of the answers alone: the
rest of a document is random.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmaccel.demo.recall.documents import (
    TRAIN_SEED,
    VALIDATION_SEED,
    Document,
    make_document,
)
from mmaccel.demo.recall.words import BOS, EOS, PAD, WORDS
from scripts.training.loop import Batch, Plan, Task, build_llama, label_logits, pack

LONGEST = 4864
"""Positions: a document of 4096 tokens, its questions, answers."""
SIZES: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64,
)  # fmt: skip
LENGTHS = {  # tokens of a document, drawn at random for each batch
    "short": (64, 96, 128),
    "middle": (64, 64, 96, 128, 128, 256, 512, 1024),
    "long": (512, 1024, 2048, 2048),
}
CHECKED = {"short": (128, 512), "middle": (512, 2048), "long": (1024, 2048, 4096)}
PLANS = {  # `batch` counts tokens of documents
    "short": Plan(2200, 200, 2048, average=0.95),
    "middle": Plan(1000, 200, 2048, average=0.98),
    "long": Plan(250, 200, 4096, rate=1.5e-3, rate_rest=1e-3, warmup=20, average=0.98),
}
_SKIPS = 8
_WEIGHTS = {"l": 0.2, "n": 0.5}  # of letters, which are many, and numbers, which are not learnt
_END_WEIGHT = 0.2
_LENGTH, _POSITIONS = 1, 2
_LETTERS = [word[0] if word[1:].isdigit() else "" for word in WORDS]
_INSIDE = np.array([letter in ("v", "l") for letter in _LETTERS])  # never begins a statement


class Recall(Task):
    """One stage; `checks` validation documents of each length.

    Attributes:
        checked: their lengths.
    """

    def __init__(self, stage: str, checks: int = 8) -> None:
        self.stage = stage
        self.weights = torch.tensor([_WEIGHTS.get(letter, 1.0) for letter in _LETTERS])
        self.weights[EOS] = _END_WEIGHT
        self.checked = CHECKED[stage]
        self.checks = []
        for length in self.checked:
            ids, labels = pack_documents(
                [make_document(VALIDATION_SEED, k, length) for k in range(checks)]
            )
            plain = torch.arange(ids.shape[1]).expand_as(ids)
            self.checks.append((torch.stack([ids, plain], 1), labels))

    def build(self, before: Path | None) -> Any:
        model = build_llama(
            vocab_size=len(WORDS),
            max_position_embeddings=LONGEST,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            **SIZES,
        )
        if before is not None:
            state = torch.load(before / "state.pt", map_location="cpu", weights_only=True)
            model.load_state_dict(state["average"])
        return model

    def batch(self, step: int, size: int) -> Batch:
        """Ids and positions [B, 2, T], labels [B, T]; documents have `size` tokens in all."""
        stage = list(LENGTHS).index(self.stage)
        rng = np.random.default_rng((TRAIN_SEED, stage, step, _LENGTH))
        length = int(rng.choice(LENGTHS[self.stage]))
        # no stage has more documents a step, nor more steps
        first = (stage * 1_000_000 + step) * 1000
        count = max(size // length, 1)
        documents = [make_document(TRAIN_SEED, first + k, length) for k in range(count)]
        ids, labels = pack_documents(documents)
        rng = np.random.default_rng((TRAIN_SEED, stage, step, _POSITIONS))
        return torch.stack([ids, skip_positions(ids, length, rng)], 1), labels

    def logits(self, model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, V] and labels [N] of all ids of answers."""
        words, positions = ids.unbind(1)
        inputs = {
            "position_ids": positions[:, :-1],
            "attention_mask": torch.ones_like(words[:, :-1]),  # else skips part sequences
        }
        return label_logits(model, words, labels, **inputs)

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        return cross_entropy(*self.logits(model, ids, labels), self.weights.to(ids.device))

    def validate(self, model: Any, device: str) -> dict[str, float]:
        """Weighted nats per token of answers, and shares of tokens that are right, by length."""
        figures = super().validate(model, device)
        for length, (ids, labels) in zip(self.checked, self.checks, strict=True):
            logits, target = self.logits(model, ids.to(device), labels.to(device))
            figures[f"right {length}"] = float((logits.argmax(-1) == target).float().mean())
        return figures


def pack_documents(documents: list[Document]) -> Batch:
    """Documents with all their questions, one row each; the answers are learnt."""
    rows = []
    for document in documents:
        row = [(document.tokens, False)]
        for question in document.questions:
            row += [(question.prompt, False), (question.answer, True)]
        rows.append(row)
    return pack(rows, PAD)


def skip_positions(ids: Tensor, length: int, rng: np.random.Generator) -> Tensor:
    """Positions [B, T] that ascend and skip ahead at a few places, for documents of `length` ids:
    before a word that is no value and no letter, or before the first question.
    """
    n_rows, width = ids.shape
    steps = np.ones((n_rows, width), dtype=np.int64)
    steps[:, 0] = 0
    for b, is_inside in enumerate(_INSIDE[ids[:, 1 : length + 1].numpy()]):
        free = np.flatnonzero(~is_inside) + 1
        where = rng.choice(free, size=min(_SKIPS, len(free)), replace=False)
        total = int(rng.integers(max(LONGEST - width, 0) + 1))
        cuts = np.sort(rng.integers(total + 1, size=len(where) - 1))
        steps[b, where] += np.diff(cuts, prepend=0, append=total)
    return torch.from_numpy(steps.cumsum(1))
