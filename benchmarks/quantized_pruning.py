"""Fewer entries, fewer bits, or both, at equal bytes: right answers of `recall`.

    python benchmarks/quantized_pruning.py --json benchmarks/results/quantized-pruning-cpu.json

Each side gets a share of the full cache's bytes: a method that evicts keeps as many entries as fit,
`QuantizedCache` over it as many as fit in 8 or 4 bits, its scales and what stays whole counted. A
share in which all entries fit is measured without eviction. The bytes of a row are as allocated.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import mmaccel
from mmaccel.catalog import make
from mmaccel.evaluation.cache.documents import draw_questions, open_model
from mmaccel.evaluation.cache.measure import answer
from mmaccel.evaluation.shares import share_of
from mmaccel.outputs.machine import describe_machine
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.layers.methods import LayerMethods

N_NEW = 10


def fit(bits: int, share: float, n_tokens: int, head: int, arguments: argparse.Namespace) -> Any:
    """The method that holds a share of the bytes of a prompt with some bits a number, or None."""
    room = share * n_tokens - N_NEW
    if bits == 32:
        return make("kv_cache", arguments.over, budget=max(1, round(room)))
    size = arguments.group
    whole = 3 * size + 2 - N_NEW  # what stays whole, and room for a window
    cost = bits / 32 + 1 / size + 1 / head  # of an entry, in entries of float32
    budget = round((room - whole) / cost) + size
    if budget <= size:
        return None
    evicting = make("kv_cache", arguments.over, budget=budget) if budget < n_tokens else None
    return mmaccel.QuantizedCache(bits=bits, group=size, residual=size, over=evicting)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for the full cache, and for each share and number of bits."""
    text_model = open_model("recall", "cpu", torch.float32)
    questions = draw_questions(arguments.questions, arguments.length)
    prompts = text_model.encode(questions)
    n_tokens = min(len(prompt) for prompt in prompts)
    head = text_model.model.config.head_dim
    sides: list[tuple[float, int, Any]] = [(1.0, 32, None)]
    for share in arguments.shares:
        for bits in (32, 8, 4):
            method = fit(bits, share, n_tokens, head, arguments)
            if method is not None:
                sides.append((share, bits, method))
    window = CausalLMWindow(text_model.model)
    rows = []
    for share, bits, method in sides:
        right = ""
        held = []
        for first in range(0, len(questions), arguments.batch):
            some = slice(first, first + arguments.batch)
            methods = LayerMethods(kv_cache=method)
            tokens, cost = answer(
                window, prompts[some], methods, text_model.ends, max_new_tokens=N_NEW
            )
            held.append(cost.bytes)
            texts = text_model.decode(tokens)
            pairs = zip(texts, questions[some], strict=True)
            right += "".join("01"[question.is_right(text)] for text, question in pairs)
        rows.append(
            {
                "share": share,
                "bits": bits,
                "method": "full cache" if method is None else repr(method),
                "right": share_of(right),
                "kib": fmean(held) / 1024,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=50, help="of each task")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.25, 0.15, 0.1])
    parser.add_argument("--over", default="snapkv", help="what evicts")
    parser.add_argument("--group", type=int, default=32, help="and entries that stay whole")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments)
    if arguments.json is not None:
        report = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": describe_machine("cpu"),
            "questions": arguments.questions,
            "length": arguments.length,
            "quantized_pruning": rows,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
