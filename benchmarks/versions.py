"""Versions of mmaccel side by side, each in an environment of its own: seconds of the same work.

    git worktree add ../old REVISION && python -m venv ../old-env
    ../old-env/bin/pip install "torch==SAME" "transformers==SAME" ../old
    python benchmarks/versions.py REVISION=../old-env/bin/python now=.venv/bin/python --json FILE

Every version makes the same, cell by cell in turn, while the others wait, so that what else the
machine does falls on all of them. The figures are medians, and medians of the ratios of the same
work by a version and by the first one. `own` makes images of `scenes` with `TextToImage`, whose
pixels are not in the seconds; `attached` is `generate` of a Llama of 12 layers with random weights
and a policy attached, greedily.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

N_PROMPT, N_TOKENS = 16, 128  # of an attached call


@dataclass(frozen=True)
class Cell:
    """What all versions make: rows by a policy, at a batch size and a guidance scale."""

    way: str
    policy: str
    arguments: tuple[tuple[str, Any], ...]
    batch_size: int
    guidance: float


def list_cells(
    ways: list[str], batch_sizes: list[int], scales: list[float], windows: list[int]
) -> list[Cell]:
    """The plain loop and `Jacobi`, at every window."""
    cells = []
    for way in ways:
        for size in batch_sizes:
            for scale in scales if way == "own" else [1.0]:
                cells.append(Cell(way, "Autoregressive", (), size, scale))
                cells += [Cell(way, "Jacobi", (("window", w),), size, scale) for w in windows]
    return cells


class Version:
    """A process that makes images with the mmaccel of its environment."""

    def __init__(self, python: str, options: dict[str, Any], threads: int) -> None:
        # -P, and another folder: the environment's mmaccel, not this checkout's
        command = [python, "-P", str(Path(__file__).resolve()), "--worker"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        self.facts = self.ask({"options": options})

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a question, and wait for the answer."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(question), file=process.stdin, flush=True)
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"a version's process ended with {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def make_images(pipe: Any, cell: dict[str, Any], first: int) -> dict[str, Any]:
    """Images of captions from number `first` on."""
    import mmaccel
    from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions

    numbers = range(first, first + cell["batch_size"])
    policy = getattr(mmaccel, cell["policy"])(**dict(cell["arguments"]))
    began = time.perf_counter()
    out = pipe(
        make_captions(EVALUATION_SEED, numbers),
        policy=policy,
        seed=list(numbers),
        guidance_scale=cell["guidance"],
    )
    seconds = time.perf_counter() - began - out.stats.pixel_seconds
    return {"seconds": seconds, "passes": out.stats.passes, "tokens": out.tokens.tolist()}


def make_model() -> Any:
    """A Llama with weights drawn from seed 0, which never ends a row."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        attn_implementation="sdpa",
    )
    model: Any = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generate(model: Any, options: dict[str, Any], cell: dict[str, Any], first: int) -> Any:
    """Tokens of an attached call whose prompts are drawn from seed `first`."""
    import torch

    import mmaccel

    policy = getattr(mmaccel, cell["policy"])(**dict(cell["arguments"]))
    drawn = torch.Generator().manual_seed(first)
    ids = torch.randint(1, 1024, (cell["batch_size"], N_PROMPT), generator=drawn)
    with mmaccel.attach(model, policy, **options) as handle:
        began = time.perf_counter()
        tokens = model.generate(ids, max_new_tokens=N_TOKENS, do_sample=False)
        seconds = time.perf_counter() - began
        passes = handle.stats.passes
    return {"seconds": seconds, "passes": passes, "tokens": tokens.tolist()}


def work() -> None:
    """What a version's process does: it answers questions, a line each, until there are no more."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import torch
    import transformers

    import mmaccel

    options = json.loads(sys.stdin.readline())["options"]
    pipe = mmaccel.TextToImage.from_pretrained("scenes", device="cpu", dtype="float32", **options)
    model = make_model()
    facts = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        cell, first = question["cell"], question["first"]
        if cell["way"] == "own":
            made = make_images(pipe, cell, first)
        else:
            made = generate(model, options, cell, first)
        print(json.dumps(made), file=answers, flush=True)


def measure(versions: dict[str, Version], cells: list[Cell], count: int) -> list[dict[str, Any]]:
    """A row for each cell and version; the first version is what the others are compared with."""
    made: dict[tuple[Cell, str], list[dict[str, Any]]] = {}
    names, turn = list(versions), 0
    for round_number in range(-1, count):  # the first warms up
        for cell in cells:
            at = turn % len(names)
            turn += 1
            for name in names[at:] + names[:at]:
                first = max(round_number, 0) * cell.batch_size
                answer = versions[name].ask({"cell": asdict(cell), "first": first})
                if round_number >= 0:
                    made.setdefault((cell, name), []).append(answer)
        print(f"{round_number + 1} of {count} rounds", file=sys.stderr)
    rows = []
    for (cell, name), own in made.items():
        before = made[cell, names[0]]
        pairs = [(a, b) for x, y in zip(before, own) for a, b in zip(x["tokens"], y["tokens"])]
        passes = [answer["seconds"] / answer["passes"] for answer in own]
        rows.append(
            asdict(cell)
            | {
                "version": name,
                "rows": len(pairs),
                "seconds": median(answer["seconds"] for answer in own),
                "passes": median(answer["passes"] for answer in own),
                "ms_a_pass": 1000 * median(passes),
                "ratio": median(y["seconds"] / x["seconds"] for x, y in zip(before, own)),
                "identical": sum(a == b for a, b in pairs),
            }
        )
    return rows


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "versions", nargs="+", metavar="NAME=PYTHON", help="the first is compared with"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=["own", "attached"], default=["own", "attached"]
    )
    parser.add_argument("--count", type=int, default=9, help="rounds over all cells")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0])
    parser.add_argument("--windows", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--options",
        type=json.loads,
        default={"compile": False},
        help="JSON, of pipeline and attach",
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    versions = {}
    for pair in given.versions:
        name, _, python = pair.partition("=")
        versions[name] = Version(os.path.abspath(python), given.options, given.threads)
    cells = list_cells(given.ways, given.batch_sizes, given.guidance, given.windows)
    rows = measure(versions, cells, given.count)
    for row in rows:
        print(
            f"{row['way']} batch {row['batch_size']} guidance {row['guidance']} {row['policy']} "
            f"{dict(row['arguments'])} {row['version']}: {row['ms_a_pass']:.2f} ms a pass, "
            f"{row['ratio']:.3f} of the first"
        )
    for version in versions.values():
        version.close()
    if given.json is not None:
        from mmaccel.outputs.machine import describe_machine  # not in a worker of another version

        report = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": describe_machine("cpu") | {"threads": given.threads},
            "versions": {name: version.facts for name, version in versions.items()},
            "against_first": rows,
        }
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--worker"] else main()
