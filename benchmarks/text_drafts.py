"""What drafts save on text: `stdlib` continues held-out modules of the standard library, or a model
in a folder answers four kinds of prompts: copy with a change, continue code, summarise, prose.

    python -m benchmarks.text_drafts --json FILE
    python -m benchmarks.text_drafts --model FOLDER --count 2 --tokens 64 --windows 8 4 --json FILE
    python -m benchmarks.text_drafts --trees dyspec:nodes=32:depth=6 --sources HEAD --json FILE

Beside this library's policies stand transformers' own `generate`, its prompt lookup, and its
assisted decoding where `--assistant` names a smaller model of the same tokens. One row at a time,
the same prompts for all ways, which take turns prompt by prompt. Passes are those of the
large model; transformers reports none, so its rows have seconds alone. With `--trees` passes alone
are counted, of each source as a chain and with every tree.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import mmaccel
from benchmarks.long_context import write_report
from mmaccel.catalog import read_method
from mmaccel.evaluation.texts import encode_text, list_texts
from mmaccel.samplers.drafting.sources import parse_source
from scripts.training.stdlib import make_prompts

SOURCES = ("ngram", "hierarchy", "token-recycling")

Way = Callable[[Tensor, float], tuple[Tensor, Any]]  # prompt, temperature -> tokens, statistics


def open_ways(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> dict[str, Way]:
    """Every way to continue a prompt, by what tables call it."""
    options: dict[str, Any] = {"max_new_tokens": arguments.tokens, "eos_token_id": None}
    options |= {"pad_token_id": tokenizer.pad_token_id, "top_k": 0}

    def masked(ids: Tensor) -> dict[str, Tensor]:
        return {"attention_mask": torch.ones_like(ids)}  # a prompt's ends of turns may be pads

    def plain(**more: Any) -> Way:
        def generate(ids: Tensor, temperature: float) -> tuple[Tensor, Any]:
            torch.manual_seed(0)
            made = model.generate(ids, **masked(ids), **options, **_sampling(temperature), **more)
            return made[0, ids.shape[1] :], None

        return generate

    def attached(policy: Any) -> Way:
        def generate(ids: Tensor, temperature: float) -> tuple[Tensor, Any]:
            handle = mmaccel.attach(model, policy, seed=0, strict=True)
            made = model.generate(ids, **masked(ids), **options, **_sampling(temperature))
            handle.detach(keep_packed=True)  # the first prompt, which warms up, pays for packing
            return made[0, ids.shape[1] :], handle.stats

        return generate

    ways = {
        "transformers": plain(),
        "transformers, prompt lookup": plain(prompt_lookup_num_tokens=arguments.windows[0] - 1),
    }
    if arguments.assistant:
        from transformers import AutoModelForCausalLM

        assistant = AutoModelForCausalLM.from_pretrained(arguments.assistant).eval()
        ways["transformers, assisted"] = plain(assistant_model=assistant)
    ways["Autoregressive()"] = attached(mmaccel.Autoregressive())
    ways["Jacobi()"] = attached(mmaccel.Jacobi())
    for window, name, tree in product(arguments.windows, arguments.sources, read_trees(arguments)):
        policy = mmaccel.Jacobi(window=window, drafts=parse_source(name), tree=tree)
        ways[repr(policy).replace(f"'{name}'", Path(name).name)] = attached(policy)
    return ways


def read_trees(arguments: argparse.Namespace) -> list[Any]:
    """No tree, and those named."""
    return [None, *(read_method("tree", text) for text in arguments.trees)]


def count_trees(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every source, tree and temperature, without seconds."""
    model, tokenizer = mmaccel.load_demo("stdlib")
    prompts = make_prompts(tokenizer, arguments.count, arguments.prompt)
    options: dict[str, Any] = {"max_new_tokens": arguments.tokens, "eos_token_id": None}
    options |= {"pad_token_id": tokenizer.pad_token_id, "top_k": 0}
    trees = read_trees(arguments)
    rows = []

    def decode(policy: Any, temperature: float) -> tuple[list[Tensor], int]:
        """The texts, and the passes of the model."""
        texts = []
        passes = 0
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with mmaccel.attach(model, policy, seed=0, strict=True) as handle:
                texts.append(model.generate(ids, **options, **_sampling(temperature)))
            assert handle.stats is not None
            passes += handle.stats.passes
        return texts, passes

    for temperature in arguments.temperatures:
        plain, n_tokens = decode(mmaccel.Autoregressive(), temperature)
        for name, window, tree in product(arguments.sources, arguments.windows, trees):
            for kind in (mmaccel.Jacobi, mmaccel.Speculative):
                policy = kind(window=window, drafts=parse_source(name), tree=tree)
                texts, passes = decode(policy, temperature)
                row = {
                    "policy": kind.__name__,
                    "drafts": Path(name).name,
                    "window": window,
                    "tree": "none" if tree is None else repr(tree),
                    "nodes": 0 if tree is None else tree.nodes,
                    "temperature": temperature,
                    "tokens_a_pass": n_tokens / passes,
                    "exactness": kind.exactness,
                    "same": sum(map(torch.equal, texts, plain)),
                }
                rows.append(row)
                print(row, flush=True)
    return rows


def _sampling(temperature: float) -> dict[str, Any]:
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature}


def open_prompts(arguments: argparse.Namespace) -> tuple[Any, Any, dict[str, list[list[int]]]]:
    """A model, its tokenizer, and the ids of prompts by their kind."""
    if arguments.model is None:
        model, tokenizer = mmaccel.load_demo("stdlib")
        return model, tokenizer, {"": make_prompts(tokenizer, arguments.count, arguments.prompt)}
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype)
    asked = {kind: texts[: arguments.count] for kind, texts in list_texts().items()}
    prompts = {
        kind: [encode_text(tokenizer, text) for text in texts] for kind, texts in asked.items()
    }
    return model, tokenizer, prompts


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every kind of prompts, temperature and way."""
    model, tokenizer, by_kind = open_prompts(arguments)
    rows = []
    for (kind, prompts), temperature in product(by_kind.items(), arguments.temperatures):
        ways = open_ways(model, tokenizer, arguments)
        seconds: dict[str, list[float]] = defaultdict(list)
        passes: dict[str, int] = defaultdict(int)
        is_same: dict[str, bool] = {}
        exactness: dict[str, str] = {}
        for number, prompt in enumerate([prompts[0], *prompts]):
            plain: Tensor | None = None
            for name, generate in ways.items():
                ids = torch.tensor([prompt])
                began = time.perf_counter()
                tokens, stats = generate(ids, temperature)
                took = time.perf_counter() - began
                if number == 0:  # warms up
                    continue
                seconds[name].append(took / len(tokens))
                if stats is None:
                    continue
                passes[name] += stats.passes
                exactness[name] = stats.exactness
                plain = tokens if plain is None else plain
                is_same[name] = is_same.get(name, True) and torch.equal(tokens, plain)
        base = seconds["transformers"]
        for name in ways:
            ratios = [old / new for old, new in zip(base, seconds[name], strict=True)]
            count = passes.get(name)
            rows.append(
                {
                    "kind": kind,
                    "way": name,
                    "temperature": temperature,
                    "ms_a_token": 1000 * median(seconds[name]),
                    "times": median(ratios),
                    "tokens_a_pass": arguments.tokens * len(prompts) / count if count else None,
                    "exactness": exactness.get(name),
                    "same": is_same.get(name),
                }
            )
    return rows


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder; by default the embedded stdlib")
    parser.add_argument("--sources", nargs="+", default=list(SOURCES), help="names or folders")
    parser.add_argument("--trees", nargs="+", default=[], help="shapes, as `--tree` has them")
    parser.add_argument("--assistant", help="folder of a smaller model with the same tokens")
    parser.add_argument("--windows", type=int, nargs="+", default=[8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--count", type=int, default=16, help="prompts")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="new ones")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", help="of a folder's model")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.positions = arguments.prompt
    if arguments.trees and arguments.model is None:
        with torch.no_grad():
            write_report(arguments, text_trees=count_trees(arguments))
        return
    with torch.no_grad():
        rows = measure(arguments)
    for row in rows:
        passed = (
            "" if row["tokens_a_pass"] is None else f", {row['tokens_a_pass']:.2f} tokens a pass"
        )
        print(
            f"{row['kind']} temperature {row['temperature']:g}, {row['way']}: "
            f"{row['ms_a_token']:.2f} ms a token, {row['times']:.2f} times{passed}, same "
            f"tokens: {row['same']}"
        )
    write_report(arguments, text_drafts=rows)


if __name__ == "__main__":
    main()
