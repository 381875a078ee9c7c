"""kvpress on the questions of `mmaccel evaluate cache recall`, in the same report.

    python -m venv kvpress && kvpress/bin/pip install torch kvpress==0.5.5 numpy safetensors
    kvpress/bin/python benchmarks/kvpress_cache.py --json benchmarks/results/recall-kvpress.json

kvpress asks for transformers below 5.3, older than what this library works with, so that it has an
environment of its own; only the documents and the figures are this library's. The same model
answers the same questions, one at a time (a press knows no ragged batch): a press compresses the
prompt without its last token by 1 - budget, then tokens are decoded at their own positions.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mmaccel.demo.recall.documents import list_questions  # noqa: E402
from mmaccel.demo.recall.words import ANSWERED, EOS  # noqa: E402
from mmaccel.evaluation.shares import paired_difference, share_of  # noqa: E402

FULL = "full cache"
PRESSES = (
    "RandomPress",
    "StreamingLLMPress",
    "SnapKVPress",
    "PyramidKVPress",
    "KnormPress",
    "KeyDiffPress",
    "TOVAPress",
    "LagKVPress",
    "ExpectedAttentionPress",
    "LeverageScorePress",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    weights = ROOT / "mmaccel" / "demo" / "weights" / "recall"
    parser.add_argument("--model", type=Path, default=weights)
    parser.add_argument("--questions", type=int, default=40, help="of each task")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.5, 0.25, 0.1])
    parser.add_argument("--presses", nargs="+", default=list(PRESSES))
    parser.add_argument("--max-new-tokens", type=int, default=10)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(argv)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    asked = list(list_questions(args.questions, args.length))
    tasks = [question.task for _, question in asked]
    rows = []
    full = ""
    for name, budget in [(FULL, None), *((p, b) for p in args.presses for b in args.budgets)]:
        row, right = _measure(model, asked, name, budget, args.max_new_tokens)
        full = full or right
        row["accuracy"] = _accuracies(right, tasks)
        row["to_full"] = None if budget is None else paired_difference(right, full)
        rows.append(row)
        print(name, budget, row["accuracy"]["all"], flush=True)
    lengths = sorted(len(document.tokens) + len(q.prompt) for document, q in asked)
    report = {
        "command": " ".join(["python", "benchmarks/kvpress_cache.py", *(argv or sys.argv[1:])]),
        "machine": {
            "name": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "versions": {p: version(p) for p in ("torch", "transformers", "kvpress")},
        },
        "model": "recall",
        "questions": len(asked),
        "prompt_tokens": [lengths[0], lengths[-1]],
        "batch": 1,
        "dtype": "float32",
        "task_names": sorted(set(tasks)),
        "kvpress_sides": rows,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _measure(
    model: Any, asked: Sequence[Any], name: str, budget: float | None, max_new_tokens: int
) -> tuple[dict[str, Any], str]:
    """A row of the report, and a character for each question, "1" where its answer is right."""
    right = ""
    kept = []
    n_bytes = []
    prefills = []
    passes = []
    for document, question in asked:
        prompt = torch.tensor([[*document.tokens, *question.prompt]])
        made, cost = answer(model, prompt, name, budget, max_new_tokens)
        right += "01"[made == question.answer]
        kept.append(cost["kept"])
        n_bytes.append(cost["bytes"])
        prefills.append(cost["prefill_seconds"])
        passes += cost["pass_seconds"]
    row = {
        "side": name if budget is None else f"{name} at {budget:g}",
        "method": name,
        "budget": budget,
        "questions": len(asked),
        "kept": fmean(kept),
        "bytes": fmean(n_bytes),
        "prefill_seconds": median(prefills),
        "pass_seconds": median(passes),
        "to_random": None,
    }
    return row, right


@torch.no_grad()
def answer(
    model: Any, prompt: Tensor, name: str, budget: float | None, max_new_tokens: int
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A greedy answer up to its end, and what it cost.

    Args:
        model: of transformers.
        prompt: `[1, T]` int64.
        name: of the press; `FULL` for none.
        budget: the fraction that it keeps.
        max_new_tokens: of the answer.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    began = time.perf_counter()
    if budget is None:
        model.model(input_ids=prompt[:, :-1], past_key_values=cache)
    else:
        import kvpress

        press = getattr(kvpress, name)(compression_ratio=1 - budget)
        with press(model):
            model.model(input_ids=prompt[:, :-1], past_key_values=cache)
    prefill_seconds = time.perf_counter() - began
    held = [cache.layers[k].keys.shape[2] for k in range(len(cache.layers))]
    last = prompt[:, -1:]
    made: list[int] = []
    pass_seconds = []
    for position in range(prompt.shape[1] - 1, prompt.shape[1] - 1 + max_new_tokens):
        began = time.perf_counter()
        positions = torch.tensor([[position]])
        logits = model(input_ids=last, past_key_values=cache, position_ids=positions).logits
        pass_seconds.append(time.perf_counter() - began)
        last = logits[:, -1:].argmax(-1)
        made.append(int(last))
        if made[-1] == EOS:
            break
    return tuple(made), {
        "kept": fmean(held) / (prompt.shape[1] - 1),
        "bytes": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers),
        "prefill_seconds": prefill_seconds,
        "pass_seconds": pass_seconds[1:] or pass_seconds,
    }


def _accuracies(right: str, tasks: Sequence[str]) -> dict[str, Any]:
    own = {task: "" for task in ANSWERED}
    for is_right, task in zip(right, tasks, strict=True):
        own[task] += is_right
    return {task: share_of(found) for task, found in (own | {"all": right}).items()}


if __name__ == "__main__":
    main()
