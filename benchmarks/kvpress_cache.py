"""kvpress on the questions of `mmaccel evaluate cache`, beside what that has measured.

    python -m venv kvpress && kvpress/bin/pip install torch kvpress==0.5.5 numpy safetensors
    kvpress/bin/python benchmarks/kvpress_cache.py --json benchmarks/results/recall-kvpress-cpu.json
    kvpress/bin/python benchmarks/kvpress_cache.py --suite documents --model FOLDER --questions 45 …

kvpress asks for transformers below 5.3, older than what this library works with, so that it has an
environment of its own; only the questions and the figures are this library's. The same model
answers the same questions: a press compresses a whole prompt by 1 - budget, then tokens are decoded
at their own positions. A prompt is processed once for all presses that look at one pass: each
evicts from the same keys and values, and caches of one size are decoded together.

A press is measured with its defaults, and with the settings of the method here where those differ.
What is in the file already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
from mmaccel.demo.recall.words import to_text  # noqa: E402
from mmaccel.evaluation.questions import Question, digest_questions  # noqa: E402
from mmaccel.evaluation.suite import draw_suite  # noqa: E402

FULL = "full cache"
Side = tuple[str, float | None]  # name of a press, and the budget


@dataclass(frozen=True)
class Press:
    """A press of kvpress.

    Attributes:
        make: of the compression ratio.
        method: what is nearest to it here, by its short name.
        looks_once: whether it evicts by what one pass of the prompt shows, attention left out.
        attention: of the model; what reads the attention of a whole prompt needs "eager".
    """

    make: Callable[[float], Any]
    method: str
    looks_once: bool = True
    attention: str = "sdpa"


def list_presses(n_layers: int) -> dict[str, Press]:
    """Presses of a model of so many layers, by what they are called in the report."""
    import kvpress

    class WordlessKVzipPress(kvpress.KVzipPress):
        """Behind KVzip's instruction `recall` has no ids, which are floats then."""

        _suffix_ids: Any

        def prepare(self, *args: Any, **kwargs: Any) -> Any:
            self._suffix_ids = self._suffix_ids.long()
            return super().prepare(*args, **kwargs)

    def snapkv(ratio: float, window: int) -> Any:
        return kvpress.SnapKVPress(ratio, window_size=window)

    def knorm(ratio: float) -> Any:
        ratios = [0, 0] + [ratio] * (n_layers - 2)
        return kvpress.PerLayerCompressionPress(kvpress.KnormPress(), ratios)

    return {
        "RandomPress()": Press(lambda r: kvpress.RandomPress(r, seed=0), "random-eviction"),
        "StreamingLLMPress()": Press(kvpress.StreamingLLMPress, "streaming-llm"),
        "SnapKVPress()": Press(kvpress.SnapKVPress, "snapkv:kernel=5"),
        "SnapKVPress(window_size=32)": Press(lambda r: snapkv(r, 32), "snapkv:kernel=5"),
        "PyramidKVPress()": Press(kvpress.PyramidKVPress, "pyramidkv:kernel=5"),
        "PyramidKVPress(window_size=32)": Press(
            lambda r: kvpress.PyramidKVPress(r, window_size=32), "pyramidkv:kernel=5"
        ),
        "ChunkKVPress(SnapKVPress())": Press(
            lambda r: kvpress.ChunkKVPress(snapkv(r, 64)), "chunkkv"
        ),
        "ChunkKVPress(SnapKVPress(window_size=32), chunk_length=10)": Press(
            lambda r: kvpress.ChunkKVPress(snapkv(r, 32), chunk_length=10), "chunkkv"
        ),
        "TOVAPress()": Press(kvpress.TOVAPress, "tova"),
        "ObservedAttentionPress()": Press(kvpress.ObservedAttentionPress, "h2o", False, "eager"),
        "CriticalKVPress(ObservedAttentionPress())": Press(
            lambda r: kvpress.CriticalKVPress(kvpress.ObservedAttentionPress(r)),
            "vatp",
            False,
            "eager",
        ),
        "ExpectedAttentionPress()": Press(kvpress.ExpectedAttentionPress, "expected-attention"),
        "KnormPress()": Press(kvpress.KnormPress, "knorm"),
        "PerLayerCompressionPress(KnormPress(), [0, 0, r, r, …])": Press(knorm, "knorm"),
        "KeyDiffPress()": Press(kvpress.KeyDiffPress, "keydiff"),
        "KVzipPress()": Press(WordlessKVzipPress, "kvzip", False),
        "KVzipPress(layerwise=True)": Press(
            lambda r: WordlessKVzipPress(r, layerwise=True), "kvzip", False
        ),
    }


@dataclass
class Caches:
    """What sides have left of one prompt, each a row of a batch.

    Attributes:
        keys: of the sides, in the report.
        cache: of transformers.
        kept: of each side, cached entries that a pass may attend to, of those that there were, mean
            over heads and layers.
        n_bytes: of keys and values of one side, as they are allocated.
        length: of the prompt.
        first: the token behind the prompt, by the full cache.
    """

    keys: list[str]
    cache: Any
    kept: list[float]
    n_bytes: int
    length: int
    first: int


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    weights = ROOT / "mmaccel" / "demo" / "weights" / "recall"
    parser.add_argument("--model", type=Path, default=weights)
    parser.add_argument("--suite", choices=["documents"], help="else the questions of recall")
    parser.add_argument("--questions", type=int, default=25, help="of each task")
    parser.add_argument("--first", type=int, help="questions in all, the first ones alone")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a document of recall")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.25, 0.1])
    parser.add_argument("--presses", nargs="+", help="some of them; all by default")
    parser.add_argument("--max-new-tokens", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(argv)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    asked = draw_suite(args.questions) if args.suite else _ask_recall(args.questions, args.length)
    presses = list_presses(model.config.num_hidden_layers)
    sides: dict[str, Side] = {FULL: (FULL, None)}
    for name in args.presses or presses:
        sides |= {f"{name} at {budget:g}": (name, budget) for budget in args.budgets}
    digest = digest_questions(asked)
    records: dict[str, dict[str, Any]] = {}
    if args.json.is_file():
        known = json.loads(args.json.read_text(encoding="utf-8"))
        records = known["records"]
        if known["digest"] != digest:
            parser.error(f"{args.json} has answers to other questions; give another file")
    for key in sides:
        records.setdefault(key, {"right": "", "answers": [], "kept": [], "bytes": []})
    encoded = [tokenizer(**one.render(tokenizer))["input_ids"] for one in asked]
    report = {
        "command": " ".join(["python", "benchmarks/kvpress_cache.py", *(argv or sys.argv[1:])]),
        "machine": {
            "name": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "versions": {p: version(p) for p in ("torch", "transformers", "kvpress")},
        },
        "model": args.model.resolve().name,
        "suite": args.suite,
        "questions": len(asked),
        "digest": digest,
        "prompt_tokens": [min(map(len, encoded)), max(map(len, encoded))],
        "batch": 1,
        "dtype": "float32",
        "task_names": sorted({question.kind for question in asked}),
        "records": records,
    }
    for index, (question, ids) in enumerate(zip(asked[: args.first], encoded, strict=False)):
        wanted = {key: sides[key] for key in sides if len(records[key]["answers"]) <= index}
        if not wanted:
            continue
        for caches in fill_caches(model, torch.tensor([ids]), wanted, presses):
            answers = answer(model, tokenizer, caches, args.max_new_tokens)
            for key, kept, text in zip(caches.keys, caches.kept, answers, strict=True):
                record = records[key]
                record["right"] += "01"[question.is_right(text)]
                record["answers"].append(text)
                record["kept"].append(round(kept, 5))
                record["bytes"].append(caches.n_bytes)
        report["kvpress_sides"] = [
            {
                "press": name,
                "method": presses[name].method if name in presses else FULL,
                "budget": budget,
                "right": records[key]["right"],
                "kept": fmean(records[key]["kept"]),
                "bytes": fmean(records[key]["bytes"]),
            }
            for key, (name, budget) in sides.items()
        ]
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(index, len(ids), {key: records[key]["right"][-1] for key in wanted}, flush=True)


def _ask_recall(per_task: int, length: int) -> list[Question]:
    found = []
    for document, question in list_questions(per_task, length):
        ids = (*document.tokens, *question.prompt)[1:]  # the tokenizer adds the first one
        found.append(Question(question.task, to_text(ids), to_text(question.answer[:-1])))
    return found


@torch.no_grad()
def fill_caches(
    model: Any, ids: Tensor, sides: dict[str, Side], presses: dict[str, Press]
) -> Iterator[Caches]:
    """Caches of a prompt `[1, T]` after the eviction of each side."""
    from transformers import DynamicCache

    modules = [layer.self_attn for layer in model.model.layers]
    seen: dict[Any, tuple[dict[str, Any], Any]] = {}
    hooks = [
        module.register_forward_hook(
            lambda module, _, given, output: seen.update({module: (given, output)}),
            with_kwargs=True,
        )
        for module in modules
    ]
    full: Any = DynamicCache()
    logits = model(input_ids=ids, past_key_values=full, logits_to_keep=1).logits
    first = int(logits[0, -1].argmax())
    for hook in hooks:
        hook.remove()
    n_whole = full.layers[0].keys[..., 0].numel() * len(modules)
    by_size: dict[tuple[int, ...], list[tuple[str, Any]]] = defaultdict(list)
    for key, (name, budget) in sides.items():
        cache: Any = DynamicCache()
        press = None if budget is None else presses[name].make(1 - budget)
        if press is not None and not presses[name].looks_once:
            model.set_attn_implementation(presses[name].attention)
            with press(model):
                model.model(input_ids=ids, past_key_values=cache)
            model.set_attn_implementation("sdpa")
            yield _join([(key, cache)], modules, n_whole, ids.shape[1], first)
            for module in modules:
                module.masked_key_indices = None
            continue
        for index, layer in enumerate(full.layers):
            cache.update(layer.keys, layer.values, index)
        if press is not None:
            press.post_init_from_model(model)
            for module in modules:
                module.rotary_emb = model.model.rotary_emb
                given, output = seen[module]
                press.forward_hook(module, [], given | {"past_key_values": cache}, output)
        by_size[tuple(layer.keys.shape[2] for layer in cache.layers)].append((key, cache))
    for rows in by_size.values():
        yield _join(rows, modules, n_whole, ids.shape[1], first)


def _join(
    rows: Sequence[tuple[str, Any]], modules: Sequence[Any], n_whole: int, length: int, first: int
) -> Caches:
    """One cache of caches of one size; presses that choose head by head leave entries where they
    are, and mask them.
    """
    from transformers import DynamicCache

    batch: Any = DynamicCache()
    n_held = n_bytes = 0
    for index, module in enumerate(modules):
        own = [cache.layers[index] for _, cache in rows]
        batch.update(
            torch.cat([one.keys for one in own]), torch.cat([one.values for one in own]), index
        )
        masked = getattr(module, "masked_key_indices", None)
        n_held += own[0].keys[..., 0].numel() - (0 if masked is None else len(masked[0]))
        n_bytes += own[0].keys.nbytes + own[0].values.nbytes
    kept = [n_held / n_whole] * len(rows)
    return Caches([key for key, _ in rows], batch, kept, n_bytes, length, first)


@torch.no_grad()
def answer(model: Any, tokenizer: Any, caches: Caches, max_new_tokens: int) -> list[str]:
    """The greedy answer of each side, up to its end."""
    ends = model.generation_config.eos_token_id
    last = torch.full((len(caches.keys), 1), caches.first)
    made = [last]
    for position in range(caches.length, caches.length + max_new_tokens - 1):
        if (torch.cat(made, 1) == ends).any(1).all():
            break
        positions = torch.full_like(last, position)
        given = {"past_key_values": caches.cache, "position_ids": positions}
        last = model(input_ids=last, **given).logits[:, -1:].argmax(-1)
        made.append(last)
    texts = []
    for row in torch.cat(made, 1).tolist():
        stop = row.index(ends) if ends in row else len(row)
        texts.append(tokenizer.decode(row[:stop], skip_special_tokens=True))
    return texts


if __name__ == "__main__":
    main()
