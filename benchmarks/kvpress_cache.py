"""kvpress on the questions of `mmaccel evaluate cache recall`, beside what that has measured.

    python -m venv kvpress && kvpress/bin/pip install torch kvpress==0.5.5 numpy safetensors
    kvpress/bin/python benchmarks/kvpress_cache.py --json benchmarks/results/recall-kvpress-cpu.json

kvpress asks for transformers below 5.3, older than what this library works with, so that it has an
environment of its own; only the documents and the figures are this library's. The same model
answers the same questions, one at a time (a press knows no ragged batch): a press compresses the
prompt without its last token by 1 - budget, then tokens are decoded at their own positions.

A press is measured with its defaults, and with the settings of the method here where those differ.
What is in the file already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mmaccel.demo.recall.documents import list_questions  # noqa: E402
from mmaccel.demo.recall.words import ANSWERED, EOS  # noqa: E402
from mmaccel.evaluation.shares import paired_difference, share_of  # noqa: E402

FULL = "full cache"


@dataclass(frozen=True)
class Press:
    """A press of kvpress.

    Attributes:
        make: of the compression ratio.
        method: what is nearest to it here, by its short name.
        attention: of the model; what reads the attention of a whole prompt needs "eager".
    """

    make: Callable[[float], Any]
    method: str
    attention: str = "sdpa"


def list_presses() -> dict[str, Press]:
    """Presses by what they are called in the report."""
    import kvpress

    class WordlessKVzipPress(kvpress.KVzipPress):
        """The separator behind KVzip's instruction has no ids here, which `encode` makes floats."""

        _suffix_ids: Any

        def prepare(self, *args: Any, **kwargs: Any) -> Any:
            self._suffix_ids = self._suffix_ids.long()
            return super().prepare(*args, **kwargs)

    def snapkv(ratio: float, window: int) -> Any:
        return kvpress.SnapKVPress(ratio, window_size=window)

    def knorm(ratio: float) -> Any:
        return kvpress.PerLayerCompressionPress(kvpress.KnormPress(), [0, 0, ratio, ratio])

    return {
        "RandomPress()": Press(lambda r: kvpress.RandomPress(r, seed=0), "random-eviction"),
        "StreamingLLMPress()": Press(kvpress.StreamingLLMPress, "streaming-llm"),
        "SnapKVPress()": Press(kvpress.SnapKVPress, "snapkv"),
        "SnapKVPress(window_size=32)": Press(lambda r: snapkv(r, 32), "snapkv"),
        "PyramidKVPress()": Press(kvpress.PyramidKVPress, "pyramidkv"),
        "PyramidKVPress(window_size=32)": Press(
            lambda r: kvpress.PyramidKVPress(r, window_size=32), "pyramidkv"
        ),
        "ChunkKVPress(SnapKVPress())": Press(
            lambda r: kvpress.ChunkKVPress(snapkv(r, 64)), "chunkkv"
        ),
        "ChunkKVPress(SnapKVPress(window_size=32), chunk_length=10)": Press(
            lambda r: kvpress.ChunkKVPress(snapkv(r, 32), chunk_length=10), "chunkkv"
        ),
        "TOVAPress()": Press(kvpress.TOVAPress, "tova"),
        "ObservedAttentionPress()": Press(kvpress.ObservedAttentionPress, "h2o", "eager"),
        "CriticalKVPress(ObservedAttentionPress())": Press(
            lambda r: kvpress.CriticalKVPress(kvpress.ObservedAttentionPress(r)), "vatp", "eager"
        ),
        "ExpectedAttentionPress()": Press(kvpress.ExpectedAttentionPress, "expected-attention"),
        "KnormPress()": Press(kvpress.KnormPress, "knorm"),
        "PerLayerCompressionPress(KnormPress(), [0, 0, r, r])": Press(knorm, "knorm"),
        "KeyDiffPress()": Press(kvpress.KeyDiffPress, "keydiff"),
        "KVzipPress()": Press(WordlessKVzipPress, "kvzip"),
        "KVzipPress(layerwise=True)": Press(
            lambda r: WordlessKVzipPress(r, layerwise=True), "kvzip"
        ),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    weights = ROOT / "mmaccel" / "demo" / "weights" / "recall"
    parser.add_argument("--model", type=Path, default=weights)
    parser.add_argument("--questions", type=int, default=25, help="of each task")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a document")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.25, 0.1])
    parser.add_argument("--presses", nargs="+", help="some of them; all by default")
    parser.add_argument("--max-new-tokens", type=int, default=10)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(argv)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    asked = list(list_questions(args.questions, args.length))
    presses = list_presses()
    sides: list[tuple[str, float | None]] = [(FULL, None)]
    sides += [(name, budget) for name in args.presses or presses for budget in args.budgets]
    rows: list[dict[str, Any]] = []
    if args.json.is_file():
        rows = json.loads(args.json.read_text(encoding="utf-8"))["kvpress_sides"]
    if rows and len(rows[0]["right"]) != len(asked):
        parser.error(f"{args.json} has answers to other questions; give another file")
    known = [(row["press"], row["budget"]) for row in rows]
    for name, budget in sides:
        if (name, budget) in known:
            continue
        press = None if budget is None else presses[name]
        row = _measure(model, asked, press, budget, args.max_new_tokens)
        row |= {
            "press": name,
            "method": FULL if press is None else press.method,
            "budget": budget,
            "accuracy": _accuracies(row["right"], [question.task for _, question in asked]),
            "to_full": press and paired_difference(row["right"], rows[0]["right"]),
        }
        rows.append(row)
        print(name, budget, row["accuracy"]["all"], flush=True)
        _write(args, argv, asked, rows)


def _write(
    args: argparse.Namespace,
    argv: Sequence[str] | None,
    asked: Sequence[tuple[Any, Any]],
    rows: list[dict[str, Any]],
) -> None:
    """The report, which a run that was stopped goes on with."""
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
        "task_names": sorted({question.task for _, question in asked}),
        "kvpress_sides": rows,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _measure(
    model: Any,
    asked: Sequence[tuple[Any, Any]],
    press: Press | None,
    budget: float | None,
    max_new_tokens: int,
) -> dict[str, Any]:
    """`right`, a character for each question, "1" where its answer is right, and what was held."""
    right = ""
    kept = []
    n_bytes = []
    model.set_attn_implementation("sdpa" if press is None else press.attention)
    for document, question in asked:
        prompt = torch.tensor([[*document.tokens, *question.prompt]])
        made = None if press is None or budget is None else press.make(1 - budget)
        answered, cost = answer(model, prompt, made, max_new_tokens)
        right += "01"[answered == question.answer]
        kept.append(cost["kept"])
        n_bytes.append(cost["bytes"])
    return {"right": right, "kept": fmean(kept), "bytes": fmean(n_bytes)}


@torch.no_grad()
def answer(
    model: Any, prompt: Tensor, press: Any, max_new_tokens: int
) -> tuple[tuple[int, ...], dict[str, float]]:
    """A greedy answer up to its end, and what the cache held of the prompt.

    Args:
        model: of transformers.
        prompt: `[1, T]` int64.
        press: of kvpress; None: nothing is compressed.
        max_new_tokens: of the answer.

    Returns:
        The answer; `kept`, cached entries that a pass may attend to, of those that there were, mean
        over heads and layers; `bytes` of keys and values as they are allocated.
    """
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    with nullcontext() if press is None else press(model):
        model.model(input_ids=prompt[:, :-1], past_key_values=cache)
    held = 0
    for layer, decoder_layer in zip(cache.layers, model.model.layers, strict=True):
        _, n_heads, n_entries, _ = layer.keys.shape
        # a press that chooses head by head leaves entries where they are, and masks them
        masked = decoder_layer.self_attn.__dict__.get("masked_key_indices")
        held += n_heads * n_entries - (0 if masked is None else len(masked[0]))
    cost = {
        "kept": held / (len(cache.layers) * n_heads * (prompt.shape[1] - 1)),
        "bytes": float(sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)),
    }
    last = prompt[:, -1:]
    made: list[int] = []
    for position in range(prompt.shape[1] - 1, prompt.shape[1] - 1 + max_new_tokens):
        positions = torch.tensor([[position]])
        logits = model(input_ids=last, past_key_values=cache, position_ids=positions).logits
        last = logits[:, -1:].argmax(-1)
        made.append(int(last))
        if made[-1] == EOS:
            break
    return tuple(made), cost


def _accuracies(right: str, tasks: Sequence[str]) -> dict[str, Any]:
    own = {task: "" for task in ANSWERED}
    for is_right, task in zip(right, tasks, strict=True):
        own[task] += is_right
    return {task: share_of(found) for task, found in (own | {"all": right}).items()}


if __name__ == "__main__":
    main()
