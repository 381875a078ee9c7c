"""Where the ceiling of trees is: tokens a pass with shapes and drafters that know the right tokens.

    python -m benchmarks.tree_ceiling --count 16 --json benchmarks/results/scenes-tree-ceiling.json

The oracle's tree is the right path alone, as long as its tokens are among the drafter's best
`ranks` after each entry: no shape of drafts of these ranks, however large, accepts more in a pass.
It is run in the loop, so that its passes begin where it has come to; tokens are the plain loop's.
`right` counts the ranks of the right tokens by the number of right tokens before them. Passes are
counted, no seconds.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mmaccel
from benchmarks.comb_study import count_passes, describe_call, write_study
from mmaccel.demo.scenes.data import EVALUATION_SEED, make_captions
from mmaccel.samplers.drafting.contract import Drafter, DraftSource, Nodes, OpenRun
from mmaccel.samplers.trees.contract import TreeShape
from mmaccel.samplers.trees.growth import Growth

RANKS = (1, 2, 3, 6)
MOST = 6  # ranks that coarse drafts look at


@dataclass(frozen=True)
class Oracle(TreeShape):
    """The right path, while its tokens are among the best ranks.

    Args:
        text: `[B, L]` int64, the right tokens.
        ranks: of an entry's children that are looked at.
        steps: the most nodes of the path.
        found: `[W, MOST]`, counted so far: right tokens of each rank, by the tokens before them.
        asked: `[W]`, counted so far: entries that were looked at.
    """

    text: Tensor = field(compare=False, repr=False)
    ranks: int = 6
    steps: int = 32
    found: Tensor = field(compare=False, repr=False, default_factory=lambda: torch.zeros(64, MOST))
    asked: Tensor = field(compare=False, repr=False, default_factory=lambda: torch.zeros(64))

    @property
    def nodes(self) -> int:
        return self.steps

    @property
    def depth(self) -> int:
        return self.steps

    def can_grow(self, source: DraftSource) -> bool:
        return source.has_children

    def grow(self, run: OpenRun, drafter: Drafter, drafts: Tensor, noise: Tensor) -> Nodes | None:
        n_steps = min(self.steps, drafts.shape[1])
        tree = Growth(run, drafter, drafts, noise)
        slots = run.buffer.slots[:, :n_steps]
        text = self.text.gather(1, slots.clamp(max=self.text.shape[1] - 1))
        is_alive = ~run.rows.is_over(slots)  # [B, n]
        entry = torch.zeros_like(drafts[:, :1])
        alive = torch.ones_like(entry, dtype=torch.bool)
        for step in range(n_steps):
            alive = alive & is_alive[:, step : step + 1]
            children = tree.children(entry, MOST)
            if children is None:
                return None
            right = text[:, step : step + 1]
            is_right = (children.tokens[:, 0] == right) & (children.log_probs[:, 0] > float("-inf"))
            self.asked[step] += alive.sum()
            self.found[step, : is_right.shape[1]] += (is_right & alive).sum(0)
            alive = alive & is_right[:, : self.ranks].any(1, keepdim=True)

            # the chain's own entry where the path is still on it, else a node
            is_chain = (entry == step) & (drafts[:, step : step + 1] == right)
            is_node = alive & ~is_chain
            parents = entry.where(is_node, 0)
            tree.add(parents, right.where(is_node, drafts[:, :1]))
            node = torch.full_like(entry, tree.width + step)
            entry = torch.where(is_chain, step + 1, node).where(alive, entry)
        return tree.nodes()


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=16, help="fresh captions")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--windows", type=int, nargs="+", default=[64])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    pipe = mmaccel.TextToImage.from_pretrained("scenes", device="cpu", compile=False)
    captions = make_captions(EVALUATION_SEED, range(given.count))
    rows: list[dict[str, Any]] = []
    for scale in given.guidance:
        options = describe_call(captions, scale, given.count)  # the oracle's rows are the text's
        plain = pipe(policy=mmaccel.Jacobi(32), **options)
        for window in given.windows:
            for ranks in RANKS:
                oracle = Oracle(plain.tokens, ranks)
                policy = mmaccel.Jacobi(window, drafts="coarse", tree=oracle)
                made = pipe(policy=policy, **options)
                shares = oracle.found / oracle.asked.clamp(min=1)[:, None]
                rows.append(
                    {
                        "guidance": scale,
                        "window": window,
                        "ranks": ranks,
                        **count_passes(made, plain),
                        "right": [[round(x, 4) for x in row] for row in shares[:16].tolist()],
                    }
                )
                print({k: v for k, v in rows[-1].items() if k != "right"}, flush=True)
    write_study(given.json, given.count, "tree_ceiling", rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
