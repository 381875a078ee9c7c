"""What reductions of a next-scale model save and lose, one row of figures for each of them.

    python -m benchmarks.next_scale --policies next-scale fast-var fast-var-random \\
        next-scale+scale-kv:budget=64 next-scale+random-eviction:budget=64 --count 64 --json FILE

A method of caches stands behind "+". Every policy makes each batch of captions in turn, with the
same seeds; the first batch is made once more before, to warm up. `seconds` are those of a whole
call; `times`, the first policy's over them, batch by batch. `positions` are entries of a row that
were computed, all branches and prompts; `differ` is the share of tokens that are others than the
first policy's, `kept` that of cached entries which no method evicted, and the rest the checker's
verdicts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch

import mmaccel
from benchmarks.rows import read_arguments, write_measured
from mmaccel.demo.scenes.checker import check_images
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
from mmaccel.evaluation.measure import Case, by_case, measure, summarise

POLICIES = ("next-scale", "fast-var", "fast-var-random")
Row = dict[str, Any]


def measure_policies(
    pipe: Any, policies: Sequence[str], captions: Sequence[str], guidance: float, batch: int
) -> Iterator[Row]:
    """Rows of `policies` at a guidance scale, in batches of `batch` captions."""

    def make(name: str, index: int) -> Row:
        policy, _, method = name.partition("+")
        first = max(index, 0) * batch
        made = pipe(
            list(captions[first : first + batch]),
            policy=policy,
            kv_cache=method or None,
            seed=list(range(first, first + batch)),
            guidance_scale=guidance,
            batch_size=batch,
        )
        evicted, entries = pipe.model.layer_counts.n_evicted
        return {"tokens": made.tokens, "stats": made.stats, "entries": (evicted, entries)}

    cases = [Case(name, lambda k, name=name: make(name, k)) for name in policies]
    runs = list(measure(cases, len(captions) // batch))
    sides = by_case(runs)
    plain = torch.cat([run["tokens"] for run in sides[policies[0]]])
    n = len(plain)
    for row in summarise(runs):
        own = sides[row["side"]]
        tokens = torch.cat([run["tokens"] for run in own])
        verdicts = check_images(pipe.image_model.tokenizer.decode(tokens), captions[:n])
        evicted, entries = (sum(run["entries"][i] for run in own) for i in range(2))
        yield {
            "policy": row["side"],
            "guidance": guidance,
            "batch": batch,
            "rows": n,
            "settings": own[0]["stats"].policy,
            "exactness": own[0]["stats"].exactness,
            "passes": sum(run["stats"].row_passes for run in own) / n,
            "positions": sum(run["stats"].positions for run in own) / n,
            "seconds": row["seconds"]["median"],
            "times": row["pairs"]["median"],
            "differ": float((tokens != plain).double().mean()),
            "kept": 1 - evicted / entries if entries else 1.0,
            "whole": sum(verdict.whole for verdict in verdicts) / n,
            **{name: sum(asdict(v)[name] for v in verdicts) / n for name in asdict(verdicts[0])},
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="scenes-var", help="a model or its folder")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="as the command line has")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="images a call")
    parser.add_argument("--count", type=int, default=64, help="captions, of whole batches")
    given = read_arguments(parser)
    pipe = mmaccel.TextToImage.from_pretrained(given.model, device="cpu")
    captions = make_captions(EVALUATION_SEED, range(given.count))
    rows: list[Row] = []
    for guidance, batch in product(given.guidance, given.batches):
        for row in measure_policies(pipe, given.policies, captions, guidance, batch):
            rows.append(row)
            print(row, flush=True)
        write_measured(given.json, count=given.count, next_scale=rows)


if __name__ == "__main__":
    main()
