"""What drafts save on text: `stdlib` continues held-out modules of the standard library, or a model
in a folder answers four kinds of prompts: copy with a change, continue code, summarise, prose.

    python -m benchmarks.text_drafts --json FILE
    python -m benchmarks.text_drafts --model FOLDER --count 2 --tokens 64 --windows 8 4 --json FILE
    python -m benchmarks.text_drafts --trees dyspec:nodes=32:depth=6 --sources HEAD --json FILE

Beside this library's policies stand transformers' own `generate`, its prompt lookup, and its
assisted decoding where `--assistant` names a smaller model of the same tokens. One row at a time,
the same prompts for all ways, which take turns prompt by prompt. Passes are those of the
large model; transformers reports none, so its rows have seconds alone. With `--trees` passes alone
are counted on `stdlib`, of each source as a chain and with every tree.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mmaccel
from benchmarks.rows import read_arguments, write_measured
from mmaccel.catalog import read_method
from mmaccel.evaluation.measure import Case, by_case, measure, summarise
from mmaccel.evaluation.texts import encode_text, list_texts
from mmaccel.samplers.drafting.sources import parse_source
from scripts.training.stdlib import make_prompts, open_stdlib

Way = Callable[[list[int]], dict[str, Any]]  # prompt -> tokens, and passes of a policy


class Texts:
    """Continues prompts by a model."""

    def __init__(self, model: Any, tokenizer: Any, n_tokens: int, temperature: float) -> None:
        self.model = model
        self.options: dict[str, Any] = {"max_new_tokens": n_tokens, "eos_token_id": None}
        self.options |= {"pad_token_id": tokenizer.pad_token_id, "top_k": 0}
        self.options["do_sample"] = temperature > 0
        if temperature:
            self.options["temperature"] = temperature

    def continue_plain(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """By transformers alone."""
        torch.manual_seed(0)
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)  # a prompt's ends of turns may be pads
        made: Tensor = self.model.generate(ids, attention_mask=mask, **self.options, **more)
        return {"tokens": made[0, ids.shape[1] :]}

    def continue_under(self, policy: Any, prompt: list[int]) -> dict[str, Any]:
        """By a policy; the first prompt, which warms up, pays for packing."""
        handle = mmaccel.attach(self.model, policy, seed=0, strict=True)
        made = self.continue_plain(prompt)
        handle.detach(keep_packed=True)
        assert handle.stats is not None
        return made | {"passes": handle.stats.passes, "exactness": handle.stats.exactness}


def open_ways(texts: Texts, given: argparse.Namespace, trees: list[Any]) -> dict[str, Way]:
    """Every way to continue a prompt, by what tables call it."""
    lookup = given.windows[0] - 1
    ways: dict[str, Way] = {
        "transformers": texts.continue_plain,
        "transformers, prompt lookup": lambda prompt: texts.continue_plain(
            prompt, prompt_lookup_num_tokens=lookup
        ),
    }
    if given.assistant:
        from transformers import AutoModelForCausalLM

        assistant = AutoModelForCausalLM.from_pretrained(given.assistant).eval()
        ways["transformers, assisted"] = lambda prompt: texts.continue_plain(
            prompt, assistant_model=assistant
        )
    policies = {"Autoregressive()": mmaccel.Autoregressive(), "Jacobi()": mmaccel.Jacobi()}
    for window, name, tree in product(given.windows, given.sources, trees):
        policy = mmaccel.Jacobi(window=window, drafts=parse_source(name), tree=tree)
        policies[repr(policy).replace(f"'{name}'", Path(name).name)] = policy
    for label, policy in policies.items():
        ways[label] = lambda prompt, policy=policy: texts.continue_under(policy, prompt)  # type: ignore[misc]
    return ways


def time_ways(
    ways: dict[str, Way], prompts: list[list[int]], n_tokens: int
) -> list[dict[str, Any]]:
    """A row for each way, beside transformers' own loop."""
    cases = [Case(name, way, lambda k: prompts[max(k, 0)]) for name, way in ways.items()]
    runs = list(measure(cases, len(prompts)))
    sides = by_case(runs)
    plain = [run["tokens"] for run in sides["Autoregressive()"]]
    rows = []
    for row in summarise(runs):
        own = sides[row["side"]]
        is_ours = "passes" in own[0]
        count = n_tokens * len(prompts)
        rows.append(
            {
                "way": row["side"],
                "ms_a_token": 1000 * row["seconds"]["median"] / n_tokens,
                "times": row["pairs"]["median"],
                "tokens_a_pass": count / sum(run["passes"] for run in own) if is_ours else None,
                "exactness": own[0].get("exactness"),
                "same": all(torch.equal(run["tokens"], one) for run, one in zip(own, plain))
                if is_ours
                else None,
            }
        )
    return rows


def count_trees(
    texts: Texts, given: argparse.Namespace, trees: list[Any], prompts: list[list[int]]
) -> list[dict[str, Any]]:
    """A row for every source and tree, without seconds."""
    rows = []
    plain = [texts.continue_under(mmaccel.Autoregressive(), prompt) for prompt in prompts]
    n_tokens = sum(run["passes"] for run in plain)
    for name, window, tree in product(given.sources, given.windows, trees):
        for kind in (mmaccel.Jacobi, mmaccel.Speculative):
            policy = kind(window=window, drafts=parse_source(name), tree=tree)
            runs = [texts.continue_under(policy, prompt) for prompt in prompts]
            rows.append(
                {
                    "policy": kind.__name__,
                    "drafts": Path(name).name,
                    "window": window,
                    "tree": "none" if tree is None else repr(tree),
                    "nodes": 0 if tree is None else tree.nodes,
                    "tokens_a_pass": n_tokens / sum(run["passes"] for run in runs),
                    "exactness": kind.exactness,
                    "same": sum(
                        torch.equal(a["tokens"], b["tokens"])
                        for a, b in zip(runs, plain, strict=True)
                    ),
                }
            )
    return rows


def open_prompts(given: argparse.Namespace) -> tuple[Any, Any, dict[str, list[list[int]]]]:
    if given.model is None:
        model, tokenizer = open_stdlib()
        return model, tokenizer, {"": make_prompts(tokenizer, given.count, given.prompt)}
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=given.dtype)
    prompts = {
        kind: [encode_text(tokenizer, text) for text in texts[: given.count]]
        for kind, texts in list_texts().items()
    }
    return model, tokenizer, prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder; by default stdlib")
    parser.add_argument(
        "--sources",
        nargs="+",
        default=["ngram", "hierarchy", "token-recycling"],
        help="names or folders",
    )
    parser.add_argument("--trees", nargs="+", default=[], help="shapes, as `--tree` has them")
    parser.add_argument("--assistant", help="folder of a smaller model with the same tokens")
    parser.add_argument("--windows", type=int, nargs="+", default=[8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--count", type=int, default=16, help="prompts")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="new ones")
    parser.add_argument("--dtype", default="float32", help="of a folder's model")
    given = read_arguments(parser)
    model, tokenizer, by_kind = open_prompts(given)
    trees = [None, *(read_method("tree", text) for text in given.trees)]
    counts_only = bool(given.trees) and given.model is None
    rows = []
    for (kind, prompts), at in product(by_kind.items(), given.temperatures):
        texts = Texts(model, tokenizer, given.tokens, at)
        if counts_only:
            made = count_trees(texts, given, trees, prompts)
        else:
            made = time_ways(open_ways(texts, given, trees), prompts, given.tokens)
        for row in made:
            rows.append({**({"kind": kind} if kind else {}), "temperature": at, **row})
            print(rows[-1], flush=True)
    write_measured(given.json, **{"text_trees" if counts_only else "text_drafts": rows})


if __name__ == "__main__":
    main()
