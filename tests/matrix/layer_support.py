"""What works with what, for every method of caches and attention: each cell is a run.

    python -m tests.matrix.layer_support --json benchmarks/results/layer-support.json

writes the table of docs/compatibility.md anew, as `test_layer_support.py` compares it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mmaccel
from benchmarks.rows import write_report
from mmaccel.catalog import METHODS
from mmaccel.evaluation.cache import answer
from mmaccel.outputs.machine import describe_machine
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from tests.fixtures.tiny_lms import build_lm
from tests.layers.test_eviction import draw_rows, generate
from tests.matrix.examples import Target, make

SLOTS = ("kv_cache", "attention")
EVERY = [(slot, name) for slot in SLOTS for name in METHODS[slot]]
PLAIN = mmaccel.Autoregressive()
LENGTHS = (26, 18, 30)


def check_window(model: Any, given: dict[str, Any]) -> str:
    """Windows of drafts make the plain loop's tokens under the method, unless it chooses anew for
    every pass: a window's queries then choose together.
    """
    rows = draw_rows(*LENGTHS)
    plain, _ = generate(model, PLAIN, rows, **given)
    made, stats = generate(model, mmaccel.Jacobi(window=5), rows, **given)
    if stats.fallbacks or stats.exactness != "relaxed":
        return "no"
    if chooses_anew(given):
        return "chosen for a window"
    return "yes" if torch.equal(made, plain) else "other tokens"


def chooses_anew(given: dict[str, Any]) -> bool:
    """Whether a method chooses for every pass."""
    (method,) = given.values()
    return bool(method.slot == "attention" and not method.chooses_prompts)


def check_guidance(model: Any, given: dict[str, Any]) -> str:
    """A guided call is served under the method, by windows too, whose tokens are those of the
    plain loop where they have to be.
    """
    negative = torch.tensor(draw_rows(14, 14, 14))
    rows = draw_rows(*LENGTHS)
    guided = given | {"guidance_scale": 1.6, "negative_prompt_ids": negative}
    plain, stats = generate(model, PLAIN, rows, **guided)
    made, others = generate(model, mmaccel.Jacobi(window=5), rows, **guided)
    if stats.fallbacks or others.fallbacks or stats.exactness != "relaxed":
        return "no"
    return "yes" if chooses_anew(given) or torch.equal(made, plain) else "other tokens"


def check_batch(model: Any, given: dict[str, Any]) -> str:
    """A row of a ragged batch has the tokens that it has alone."""
    rows = draw_rows(*LENGTHS)
    together, _ = generate(model, PLAIN, rows, **given)
    alone = [generate(model, PLAIN, [row], **given)[0][0] for row in rows]
    return "yes" if torch.equal(torch.stack(alone), together) else "other tokens"


def check_memory(model: Any, given: dict[str, Any]) -> str:
    """After the prompt, layers hold fewer bytes than without the method."""
    window = CausalLMWindow(model)
    prompts = [torch.tensor(row) for row in draw_rows(*LENGTHS)]
    whole, own = (
        answer(window, prompts, methods, [], max_new_tokens=4)[1]["bytes"]
        for methods in (LayerMethods(), LayerMethods(**given))
    )
    return "yes" if own < whole else "no"


CHECKS: dict[str, Callable[[Any, dict[str, Any]], str]] = {
    "window": check_window,
    "guidance": check_guidance,
    "batch": check_batch,
    "memory": check_memory,
}


def measure(slot: str, name: str) -> dict[str, str]:
    """What happened in each column."""
    model = build_lm("llama")
    method = make(slot, name, Target(model))
    found = {"slot": slot, "name": name, "method": type(method).__name__}
    return found | {column: check(model, {slot: method}) for column, check in CHECKS.items()}


def main() -> None:
    """Writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    report = {
        "command": f"python -m tests.matrix.layer_support --json {options.json}",
        "machine": describe_machine("cpu"),
        "layer_support": [measure(slot, name) for slot, name in EVERY],
    }
    write_report(options.json, report)


if __name__ == "__main__":
    main()
