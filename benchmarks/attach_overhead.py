"""What `attach` costs: seconds of the first call, and seconds a `generate` call takes more.

A Llama, or a GPT-2 (`--kind gpt2 --hidden 768`), with random weights generates greedily, in one
process, plain and with a policy attached, call by call in turn. Random weights let no draft pass,
so the figures of `Jacobi` are an upper bound of what drafting costs; those of `Autoregressive` are
the cost of the plugin itself.
`outside_loop_seconds` is the part of an attached call outside the policy's own loop: what
transformers prepares, and what `attach` adds.
The script uses the public interface alone: PYTHONPATH chooses the version that is measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import mmaccel

N_PROMPT = 16


def make_model(kind: str, layers: int, hidden: int) -> Any:
    """A Llama, or a GPT-2 with all its ids, with weights drawn from seed 0."""
    torch.manual_seed(0)
    model: Any
    if kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(n_layer=layers, n_embd=hidden, n_head=max(1, hidden // 64))
        )
    else:
        model = LlamaForCausalLM(_describe_llama(layers, hidden))
    model = model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _describe_llama(layers: int, hidden: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=1024,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        attn_implementation="sdpa",
    )


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """Wall seconds of one call, and what it returned."""
    began = time.perf_counter()
    out = work()
    return time.perf_counter() - began, out


def measure_first_attach(arguments: argparse.Namespace, policy: Any) -> dict[str, float]:
    """Seconds of the first `attach` of fresh models, which includes the self-check."""
    found = []
    for _ in range(arguments.repeats):
        model = make_model(arguments.kind, arguments.layers, arguments.hidden)
        seconds, handle = seconds_of(lambda: mmaccel.attach(model, policy))  # noqa: B023
        handle.detach()
        again, handle = seconds_of(lambda: mmaccel.attach(model, policy))  # noqa: B023
        handle.detach()
        found.append((seconds, again))
    first, again = (statistics.median(column) for column in zip(*found))
    return {"first_attach_seconds": first, "second_attach_seconds": again}


def measure_calls(model: Any, policy: Any, n_tokens: int, repeats: int) -> dict[str, Any]:
    """Medians over interleaved pairs of a plain call and a call under the policy."""
    ids = torch.arange(1, N_PROMPT + 1)[None]

    def generate() -> torch.Tensor:
        out: torch.Tensor = model.generate(ids, max_new_tokens=n_tokens, do_sample=False)
        return out

    plain, ours, outside, passes = [], [], [], 0
    for index in range(repeats + 1):
        own_seconds, expected = seconds_of(generate)
        with mmaccel.attach(model, policy) as handle:
            seconds, received = seconds_of(generate)
            stats = handle.stats
            assert stats is not None and not stats.fallbacks
            passes = stats.passes
        if not torch.equal(expected, received):
            raise SystemExit(f"{policy!r}: other tokens than plain generate at {n_tokens}")
        if index:  # the first pair warms up
            plain.append(own_seconds)
            ours.append(seconds)
            outside.append(seconds - stats.seconds)
    more = statistics.median(b - a for a, b in zip(plain, ours))
    return {
        "policy": repr(policy),
        "tokens": n_tokens,
        "passes": passes,
        "route": stats.route,
        "plain_seconds": statistics.median(plain),
        "attached_seconds": statistics.median(ours),
        "overhead_seconds": more,
        "outside_loop_seconds": statistics.median(outside),
        "ratio": statistics.median(b / a for a, b in zip(plain, ours)),
    }


def main() -> None:
    """Measure, print, and write JSON where `--out` says so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["llama", "gpt2"], default="llama")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--repeats", type=int, default=7, help="measured pairs, at least 5")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    policies = [mmaccel.Autoregressive(), mmaccel.Jacobi()]
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "mmaccel": mmaccel.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {arguments.threads} threads",
        "kind": arguments.kind,
        "layers": arguments.layers,
        "hidden": arguments.hidden,
        "repeats": arguments.repeats,
    }
    report |= measure_first_attach(arguments, policies[0])
    model = make_model(arguments.kind, arguments.layers, arguments.hidden)
    report["calls"] = [
        measure_calls(model, policy, n_tokens, arguments.repeats)
        for policy in policies
        for n_tokens in arguments.tokens
    ]
    text = json.dumps(report, indent=2)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
