"""Writes the folder of `stdlib`: float16 weights, tokenizer, measured figures, the card.

The model's bits a byte on held-out modules stand beside those of gzip and xz, each module by
itself, and of a 5-gram of the same byte pairs, interpolated by the rule of I. H. Witten and T. C.
Bell, "The Zero-Frequency Problem", IEEE Transactions on Information Theory 37 (4), 1991 (method C).
"""

from __future__ import annotations

import gzip
import json
import lzma
import math
import platform
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from mmaccel.demo.loading import load_demo
from mmaccel.demo.stdlib.modules import Module, read_modules
from scripts.training.cards import write_stdlib_card
from scripts.training.export import (
    GENERATOR_FILES,
    check_trained,
    copy_files,
    this_machine,
    write_folder,
)
from scripts.training.stdlib import LONGEST, WORDS

ORDER = 5
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def export_stdlib(work: str | Path, target: str | Path) -> None:
    """Copies the tokenizer and the averaged weights from `work` to `target`.

    Args:
        work: of the training.
        target: made where missing.

    Raises:
        OptionError: nothing has been trained in `work`.
    """
    work = Path(work)
    target = Path(target)
    check_trained(work / "generator")
    target.mkdir(parents=True, exist_ok=True)
    copy_files(work / "generator", target, GENERATOR_FILES)
    copy_files(work / "tokenizer", target, _TOKENIZER_FILES)


def export_stdlib_card(
    work: str | Path, target: str | Path, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Measures the exported folder on the CPU and writes `card.json` and `README.md` there.

    Args:
        work: holds the log.
        target: of `export_stdlib`.
        notes: sentences about this training that its log does not say.

    Returns:
        The content of `card.json`.
    """
    work = Path(work)
    target = Path(target)
    model, tokenizer = load_demo("stdlib", target)
    modules = read_modules()
    held_out = [module for module in modules if module.is_held_out]
    training = [module for module in modules if not module.is_held_out]
    n_bytes = sum(len(module.text.encode()) for module in held_out)
    gram = NGram([encode(tokenizer, module) for module in training], ORDER)
    by_module = {module.name: measure_bits(model, tokenizer, [module]) for module in held_out}
    sizes = {module.name: len(module.text.encode()) for module in held_out}
    bits = {
        "stdlib": sum(by_module[name] * sizes[name] for name in sizes) / n_bytes,
        f"{ORDER}-gram": sum(gram.bits(encode(tokenizer, module)) for module in held_out) / n_bytes,
        "xz": 8 * sum(len(lzma.compress(m.text.encode())) for m in held_out) / n_bytes,
        "gzip": 8 * sum(len(gzip.compress(m.text.encode(), 9)) for m in held_out) / n_bytes,
    }
    card: dict[str, Any] = {
        "name": "stdlib",
        "command": "\n".join(
            f"python -m scripts.training {part} --work runs/stdlib"
            for part in ("stdlib", "stdlib-export", "stdlib-card")
        ),
        "parameters": sum(p.numel() for p in model.parameters()),
        "sizes": {
            "depth": model.config.num_hidden_layers,
            "heads": model.config.num_attention_heads,
            "key_heads": model.config.num_key_value_heads,
            "width": model.config.head_dim,
            "words": model.config.vocab_size,
            "longest": model.config.max_position_embeddings,
        },
        "bits_a_byte": {name: round(value, 4) for name, value in bits.items()},
        "by_module": {name: round(value, 4) for name, value in by_module.items()},
        "modules": {
            "training": len(training),
            "held_out": len(held_out),
            "held_out_bytes": n_bytes,
            "bytes_a_token": round(
                n_bytes / sum(len(encode(tokenizer, module)) for module in held_out), 3
            ),
            "python": platform.python_version(),
        },
        "training": _cost(work),
        "notes": list(notes),
        "measured_with": this_machine("cpu"),
    }
    write_folder(target, card, write_stdlib_card(card))
    return card


def encode(tokenizer: Any, module: Module) -> list[int]:
    """A module's ids, the one of its beginning first and that of its end last."""
    ids: list[int] = tokenizer(module.text, verbose=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id]


@torch.no_grad()
def measure_bits(
    model: Any, tokenizer: Any, modules: Sequence[Module], longest: int = LONGEST
) -> float:
    """Bits a byte of modules.

    A module that is longer than the model's positions is read in pieces that overlap by half; of
    all but the first one the second half counts.

    Args:
        model: of `mmaccel.load_demo("stdlib")`.
        tokenizer: its tokenizer.
        modules: read one by one.
        longest: tokens of a piece.
    """
    nats = 0.0
    for module in modules:
        ids = torch.tensor(encode(tokenizer, module))
        counted = 1  # ids before it have been predicted, or are the beginning
        for first in range(0, len(ids), longest // 2):
            piece = ids[first : first + longest]
            if first + len(piece) <= counted:
                break
            logits = model(piece[None, :-1], use_cache=False).logits[0]
            losses = cross_entropy(logits, piece[1:], reduction="none")
            nats += float(losses[counted - first - 1 :].sum())
            counted = first + len(piece)
    return nats / math.log(2) / sum(len(module.text.encode()) for module in modules)


class NGram:
    """An interpolated n-gram model (Witten and Bell, method C).

    P(w | h) = (c(h w) + t(h) P(w | h')) / (c(h) + t(h)): c counts, t(h) is the number of different
    words after h, and h' is h without its first word. Below the unigram every word is alike.

    Args:
        texts: ids.
        order: n.
    """

    def __init__(self, texts: Sequence[Sequence[int]], order: int) -> None:
        self.order = order
        self._after: list[dict[tuple[int, ...], Counter[int]]] = [
            defaultdict(Counter) for _ in range(order)
        ]
        for ids in texts:
            for k in range(len(ids)):
                for n in range(min(order, k + 1)):
                    self._after[n][tuple(ids[k - n : k])][ids[k]] += 1
        self._totals = [
            {context: counts.total() for context, counts in table.items()} for table in self._after
        ]

    def probability(self, context: Sequence[int], word: int) -> float:
        """P(word | context), of which the last n - 1 words count."""
        found = 1 / WORDS
        for n in range(min(self.order, len(context) + 1)):
            seen = tuple(context[len(context) - n :])
            counts = self._after[n].get(seen)
            if counts is None:
                return found
            kinds = len(counts)
            found = (counts[word] + kinds * found) / (self._totals[n][seen] + kinds)
        return found

    def bits(self, ids: Sequence[int]) -> float:
        """Bits of all ids but the first."""
        probabilities = (
            self.probability(ids[max(0, k - self.order + 1) : k], ids[k])
            for k in range(1, len(ids))
        )
        return -sum(map(math.log2, probabilities))


def _cost(work: Path) -> dict[str, Any]:
    log = (work / "generator.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [json.loads(line) for line in log]
    stages: list[dict[str, Any]] = []
    curve = []
    for line in lines:
        if "plan" in line:
            stage = {"length": line["task"]["length"], "batch": line["plan"]["batch"]}
            stages += [stage] if stage not in stages else []
        if "validation" in line:
            found = {key: line[key] for key in ("step", "validation", "bits_a_byte")}
            curve.append({**found, **stages[-1]})
    return {
        "steps": lines[-1]["step"],
        "minutes": round(lines[-1]["seconds"] / 60, 1),
        "curve": curve,
    }
