"""What `mmaccel.Sequoia` is made from: how often the drafter's r-th best is the right token.

    python benchmarks/tree_acceptance.py --drafts coarse --count 8

Counted in every pass after each of the text's own right tokens: the chance of a child of rank r if
all before it is right, by the number of drafts before it. The captions are none of those that other
studies measure. Passes are counted, no seconds.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import mmaccel
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
from mmaccel.samplers.drafting.contract import Drafter, DraftSource, Nodes, OpenRun, Paths
from mmaccel.samplers.trees.contract import TreeShape

FIRST = 1000  # caption; the studies' begin at 0
RANKS = 8


@dataclass(frozen=True)
class Counted(TreeShape):
    """No tree: it counts which children are right.

    Args:
        text: `[B, L]` int64, the right tokens.
        right: `[W, RANKS]`, counted so far: children of each rank that were right.
        asked: `[W]`, counted so far: entries whose children were looked at.
    """

    text: Tensor = field(compare=False)
    right: Tensor = field(compare=False)
    asked: Tensor = field(compare=False)

    nodes = 1
    depth = 1

    def can_grow(self, source: DraftSource) -> bool:
        return source.has_children

    def grow(self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor) -> Nodes | None:
        slots = run.buffer.slots[:, :-1]  # [B, W-1]
        n = slots.shape[1]
        is_wanted = ~run.rows.is_over(slots)
        text = self.text.gather(1, slots.clamp(max=self.text.shape[1] - 1))
        paths = Paths(text[:, None].expand(-1, n, -1), torch.arange(n).expand(len(text), -1))
        found = drafter.children(run, paths, noise, k=RANKS) if n else None
        if found is None:
            return None
        is_right = (found.tokens == text[..., None]) & (found.log_probs > float("-inf"))
        is_right = is_right & is_wanted[..., None]
        self.right[:n, : is_right.shape[2]] += is_right.sum(0)
        self.asked[:n] += is_wanted.sum(0)
        return None


def main() -> None:
    """Count, and print a row for each number of drafts before a child."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafts", default="coarse", choices=("coarse", "token-recycling"))
    parser.add_argument("--count", type=int, default=8, help="captions")
    parser.add_argument("--window", type=int, default=40)
    given = parser.parse_args()
    pipe = mmaccel.TextToImage.from_pretrained("scenes", device="cpu", compile=False)
    options: dict[str, Any] = {
        "prompt": make_captions(EVALUATION_SEED, range(FIRST, FIRST + given.count)),
        "seed": list(range(given.count)),
        "guidance_scale": 1.0,
        "batch_size": given.count,
    }
    text = pipe(policy=mmaccel.Jacobi(), **options).tokens
    shape = Counted(text, torch.zeros(given.window, RANKS), torch.zeros(given.window))
    pipe(policy=mmaccel.Jacobi(given.window, drafts=given.drafts, tree=shape), **options)
    chances = shape.right / shape.asked.clamp(min=1)[:, None]
    for before, row in enumerate(chances[:-1].tolist()):
        print(f"{before:3}", *(f"{chance:.3f}" for chance in row))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
