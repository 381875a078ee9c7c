"""What a captured pass may take on a GPU, on paper: counted nodes and bytes, assumed speeds.

    python -m benchmarks.gpu.estimate --json benchmarks/results/pass-nodes.json

writes the file from which `scripts/update_docs.py` makes the table of
docs/performance.md. Nodes are counted on a CPU (`nodes.record_pass`) on models of the same classes
with one and two tiny layers: the difference is a layer's, the rest is what the pass does once.
Neither depends on sizes, but for attention's second kernel, which runs where keys are split, as it
is here. Bytes are those of the floor in `steps`: weights without the table of embeddings, and keys
and values of two rows. The time is

    nodes x NODE_US + bytes / GB_PER_S

in which nothing overlaps and no product is bound by arithmetic: both are assumptions, and so are
the two constants. No figure here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import (
    SIZES,
    Size,
    build,
    key_bytes,
    open_window,
    shrink,
    sketch,
    weight_bytes,
)
from benchmarks.gpu.nodes import record_pass
from benchmarks.gpu.steps import routes_of
from mmaccel.contracts import Policy, Prompt
from mmaccel.outputs.whole_files import write_whole
from mmaccel.pipelines.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.jacobi import Jacobi

MODELS = ("Janus-Pro-1B", "Janus-Pro-7B", "Emu3-8B")
POLICIES: tuple[Policy, ...] = (Autoregressive(), Jacobi(32))
CONTEXT = 1024
NODE_US = 2.5  # a small kernel in a graph: the gap before it and its own work
GB_PER_S = 3000.0  # 90 % of the 3.35 TB/s in the data sheet of an H100 SXM
_ROOM = 600  # positions: keys of 512 and more are split


def main() -> int:
    """Count, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    file = parser.parse_args().json
    report = {
        "command": f"python -m benchmarks.gpu.estimate --json {file}",
        "versions": {"torch": torch.__version__.split("+")[0]},
        "node_us": NODE_US,
        "gb_per_s": GB_PER_S,
        "context": CONTEXT,
        "passes": [row for size in SIZES if size.name in MODELS for row in estimate(size)],
    }
    text = json.dumps(report, indent=1) + "\n"
    write_whole(file, lambda path: path.write_text(text, encoding="utf-8"))
    return 0


def estimate(size: Size) -> list[dict[str, Any]]:
    """A model's passes, by forward and policy."""
    whole = sketch(size)
    config = whole.config.get_text_config()
    n_ids = config.vocab_size if size.codes is None else len(size.codes)
    n_layers, n_bytes = config.num_hidden_layers, weight_bytes(whole, n_ids)
    n_bytes += key_bytes(whole, 2, CONTEXT)
    floor = n_bytes / GB_PER_S / 1e6
    rows = []
    for route, policy, (one, two, outside) in count(size):
        layer = sum(two.values()) - sum(one.values())
        once = sum(one.values()) - layer
        nodes = once + layer * n_layers
        glue = nodes * NODE_US / 1000
        rows.append(
            {
                "model": size.name,
                "route": route,
                "policy": repr(policy),
                "layers": n_layers,
                "nodes_once": once,
                "nodes_outside": sum(outside.values()),
                "nodes_a_layer": layer,
                "nodes": nodes,
                "bytes": n_bytes,
                "floor_ms": floor,
                "nodes_ms": glue,
                "ms": floor + glue,
            }
        )
    return rows


def count(size: Size) -> list[tuple[str, Policy, list[Counter[str]]]]:
    """What passes launch by forward and policy: of one tiny layer, of two, outside the model."""
    small = shrink(size)
    models = []
    for n_layers in (1, 2):
        own = replace(small, config=small.config | {"num_hidden_layers": n_layers})
        models.append((own, build(own, torch.device("cpu"))))
    found = []
    windows = [open_window(model, own) for own, model in models]
    for route in routes_of(windows[0]):
        for policy in POLICIES:
            passes = [count_pass(window, policy, route) for window in windows]
            passes.append(count_pass(windows[0], policy, route, whole=False))
            found.append((route, policy, passes))
    return found


def count_pass(
    window: Any, policy: Policy, route: str = "model", whole: bool = True
) -> Counter[str]:
    """What a pass of one image with guidance, two rows, launches on a GPU; without `whole`, outside
    the model alone.
    """
    window.attention = "kernel"
    if hasattr(window, "fused"):
        window.fused = route == "fused"
    prompt = Prompt(torch.ones((2, 8), dtype=torch.int64), torch.full((2,), 8), 2)
    params, noise = SamplingParams(guidance_scale=5.0), Noise.from_seed(0, 1, "cpu")
    if isinstance(window, ImageTokenWindow):
        window.begin(prompt)

    def run(runner: Any) -> None:
        window.runner = runner
        policy.sample(window, prompt, _ROOM - 8, params=params, noise=noise, on_step=None)

    try:
        return record_pass(run, without=None if whole else window)
    finally:
        window.runner = None


if __name__ == "__main__":
    sys.exit(main())
