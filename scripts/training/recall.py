"""`recall`, a small `LlamaForCausalLM` that answers questions about long documents: its training.

Three stages, each of which begins from the one before and lies in a folder of its own: `short`,
`middle` and `long` documents. What is learnt on short ones holds on long ones, because positions
skip ahead between statements, up to the longest text (D. Zhu et al., "PoSE: Efficient Context
Window Extension of LLMs via Positional Skip-wise Training", 2023, arXiv:2309.10400). Departure: a
document has several skips, at random places between statements, as each statement has to stay
whole.

All questions about a document follow it in one sequence. Losses are those of the answers alone:
the rest of a document is random.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmaccel.demo.recall.documents import TRAIN_SEED, VALIDATION_SEED, Document, make_document
from mmaccel.demo.recall.words import (
    BOS,
    EOS,
    LETTER,
    N_LETTERS,
    N_NUMBERS,
    N_VALUES,
    NUMBER,
    PAD,
    TASKS,
    VALUE,
    WORDS,
)
from scripts.training.data import IGNORE
from scripts.training.generator import GeneratorTraining, train_generator

WIDTH, DEPTH, HEADS, KEY_HEADS, HEAD_WIDTH, INNER = 128, 4, 4, 2, 64, 256
LONGEST = 4864
"""Positions: a document of 4096 tokens, its questions, answers."""
ROPE_BASE = 500_000.0
STAGES = ("short", "middle", "long")
LENGTHS = {  # tokens of a document, drawn at random for each batch
    "short": (64, 96, 128),
    "middle": (64, 64, 96, 128, 128, 256, 512, 1024),
    "long": (512, 1024, 2048, 2048),
}
CHECKED = {"short": (128, 512), "middle": (512, 2048), "long": (1024, 2048, 4096)}
PLANS = {  # `batch` counts tokens of documents
    "short": GeneratorTraining(
        steps=2200, fall=200, batch=2048, average=0.95, snapshots=(), mixed=False
    ),
    "middle": GeneratorTraining(
        steps=1000, fall=200, batch=2048, average=0.98, snapshots=(), mixed=False
    ),
    "long": GeneratorTraining(
        steps=250, fall=200, batch=4096, rate=1.5e-3, rate_rest=1e-3, warmup=20, average=0.98,
        snapshots=(), mixed=False,
    ),
}  # fmt: skip
_SKIPS = 8
_END_WEIGHT = 0.2
_LETTER_WEIGHT = 0.2
_NUMBER_WEIGHT = 0.5
_LENGTH, _POSITIONS = 1, 2


def build_model() -> Any:
    """A new model with random weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            head_dim=HEAD_WIDTH,
            max_position_embeddings=LONGEST,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
            tie_word_embeddings=False,
            initializer_range=0.02,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


@dataclass(frozen=True)
class Packed:
    """Documents with all their questions, one row each, padded on the right.

    Attributes:
        ids: [B, T] int64.
        labels: [B, T] int64, the id itself where it belongs to an answer, `IGNORE` elsewhere.
        tasks: [B, T] int64, number of the task of an answer's first id, -1 elsewhere.
        lengths: [B] int64, tokens of each document.
    """

    ids: Tensor
    labels: Tensor
    tasks: Tensor
    lengths: Tensor


def pack(documents: list[Document]) -> Packed:
    """Packs documents."""
    rows = []
    for document in documents:
        ids = list(document.tokens)
        labels = [IGNORE] * len(ids)
        tasks = [-1] * len(ids)
        for question in document.questions:
            ids += [*question.prompt, *question.answer]
            labels += [IGNORE] * len(question.prompt) + list(question.answer)
            tasks += [-1] * len(question.prompt) + [TASKS.index(question.task)]
            tasks += [-1] * (len(question.answer) - 1)
        rows.append((ids, labels, tasks))
    shape = (len(rows), max(len(ids) for ids, _, _ in rows))
    packed = Packed(
        torch.full(shape, PAD),
        torch.full(shape, IGNORE),
        torch.full(shape, -1),
        torch.tensor([len(document.tokens) for document in documents]),
    )
    for b, (ids, labels, tasks) in enumerate(rows):
        packed.ids[b, : len(ids)] = torch.tensor(ids)
        packed.labels[b, : len(ids)] = torch.tensor(labels)
        packed.tasks[b, : len(ids)] = torch.tensor(tasks)
    return packed


def skip_positions(packed: Packed, rng: np.random.Generator) -> Tensor:
    """Positions [B, T] that ascend and skip ahead at a few places.

    A skip stands before a word of the document that is no value and no letter, or before the first
    question.
    """
    n_rows, width = packed.ids.shape
    ids = packed.ids.numpy()
    inside = ((ids >= VALUE) & (ids < VALUE + N_VALUES)) | (
        (ids >= LETTER) & (ids < LETTER + N_LETTERS)
    )
    steps = np.ones((n_rows, width), dtype=np.int64)
    steps[:, 0] = 0
    for b, length in enumerate(packed.lengths.tolist()):
        free = np.flatnonzero(~inside[b, 1 : length + 1]) + 1
        where = rng.choice(free, size=min(_SKIPS, len(free)), replace=False)
        total = int(rng.integers(max(LONGEST - width, 0) + 1))
        cuts = np.sort(rng.integers(total + 1, size=len(where) - 1))
        steps[b, where] += np.diff(cuts, prepend=0, append=total)
    return torch.from_numpy(steps.cumsum(1))


def answer_logits(model: Any, ids: Tensor, labels: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Logits [N, words] and labels [N] of all ids of answers."""
    hidden = model.model(
        input_ids=ids[:, :-1],
        position_ids=positions[:, :-1],
        attention_mask=torch.ones_like(ids[:, :-1]),  # else skips are taken for packed sequences
        use_cache=False,
    ).last_hidden_state
    target = labels[:, 1:]
    chosen = target != IGNORE
    return model.lm_head(hidden[chosen]), target[chosen]


class Recall:
    """One stage; see `scripts.training.generator.Task`.

    Args:
        stage: one of `STAGES`.
        compiled: `torch.compile` the layers (needs a C compiler).
        checks: validation documents of each length.
    """

    def __init__(self, stage: str, compiled: bool = False, checks: int = 8) -> None:
        self.options: dict[str, Any] = {"lengths": LENGTHS[stage]}
        self.stage = stage
        self.compiled = compiled
        self.checks = {
            n: pack([make_document(VALIDATION_SEED, k, n) for k in range(checks)])
            for n in CHECKED[stage]
        }

    def build(self, start: str | None) -> Any:
        """See `Task`; `start` is the work folder of the stage before."""
        model = build_model()
        if start is not None:
            file = Path(start) / "generator.pt"
            state = torch.load(file, map_location="cpu", weights_only=True)["average"]
            model.load_state_dict(state)
        if self.compiled:  # in place, so that the names of the weights stay
            model.model.compile(dynamic=True)
        return model

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Ids and positions [B, 2, T], labels [B, T]; documents have `size` tokens in all."""
        stage = STAGES.index(self.stage)
        rng = np.random.default_rng((TRAIN_SEED, stage, step, _LENGTH))
        length = int(rng.choice(LENGTHS[self.stage]))
        count = max(size // length, 1)
        # no stage has more documents a step, nor more steps
        first = (stage * 1_000_000 + step) * 1000
        packed = pack([make_document(TRAIN_SEED, first + k, length) for k in range(count)])
        rng = np.random.default_rng((TRAIN_SEED, stage, step, _POSITIONS))
        return torch.stack([packed.ids, skip_positions(packed, rng)], 1), packed.labels

    def distinct(self, steps: int, size: int) -> int:
        """See `Task`: tokens of documents, none of which is drawn twice."""
        return steps * size

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        """See `Task`: nats per token of the answers; ends and letters, of which there are many,
        and numbers, which are not learnt, count less.
        """
        words, positions = ids.unbind(1)
        logits, target = answer_logits(model, words, labels, positions)
        weights = torch.ones(len(WORDS), device=logits.device)
        weights[EOS] = _END_WEIGHT
        weights[LETTER : LETTER + N_LETTERS] = _LETTER_WEIGHT
        weights[NUMBER : NUMBER + N_NUMBERS] = _NUMBER_WEIGHT
        return cross_entropy(logits, target, weights)

    @torch.no_grad()
    def validate(self, model: Any, device: str) -> dict[str, float]:
        """Nats per token of answers, and shares of right ones, by length and task."""
        model.eval()
        losses, figures = [], {}
        for length, packed in self.checks.items():
            loss, right = measure(model, packed)
            losses.append(loss)
            every = [answer for answers in right.values() for answer in answers]
            figures[f"{length}"] = sum(every) / len(every)
            figures |= {f"{length} {task}": sum(own) / len(own) for task, own in right.items()}
        model.train()
        return {"validation": sum(losses) / len(losses)} | figures


def measure(model: Any, packed: Packed, batch: int = 4) -> tuple[float, dict[str, list[bool]]]:
    """Nats per token of the answers, and whether each answer is right in every id, by task."""
    right: dict[str, list[bool]] = defaultdict(list)
    total = 0.0
    count = 0
    for b in range(0, len(packed.ids), batch):
        ids, labels = packed.ids[b : b + batch], packed.labels[b : b + batch]
        positions = torch.arange(ids.shape[1]).expand(ids.shape)
        logits, target = answer_logits(model, ids, labels, positions)
        total += float(cross_entropy(logits, target, reduction="sum"))
        count += len(target)
        tasks = packed.tasks[b : b + batch, 1:][labels[:, 1:] != IGNORE].tolist()
        is_right = (logits.argmax(-1) == target).tolist()
        begins = [k for k, task in enumerate(tasks) if task >= 0]
        for begin, end in zip(begins, [*begins[1:], len(tasks)], strict=True):
            right[TASKS[tasks[begin]]].append(all(is_right[begin:end]))
    return total / count, right


def train_recall(
    work: str | Path,
    plans: dict[str, GeneratorTraining],
    device: str = "cpu",
    compiled: bool = False,
) -> None:
    """Trains all stages, or goes on training.

    Args:
        work: receives a folder a stage, each as `train_generator` says.
        plans: of each stage, such as `PLANS`; one of 0 steps is left out.
        device: "cpu" or "cuda".
        compiled: see `Recall`.
    """
    before: str | None = None
    for stage in STAGES:
        if plans[stage].steps == 0:
            continue
        folder = Path(work) / stage
        folder.mkdir(parents=True, exist_ok=True)
        train_generator(
            folder, Recall(stage, compiled), replace(plans[stage], start=before), device
        )
        before = str(folder)
