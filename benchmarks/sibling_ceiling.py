"""How often rules of siblings accept one of K drafts, and how often any rule could.

    python benchmarks/sibling_ceiling.py --json benchmarks/results/sibling-ceiling.json

Pairs of distributions over V tokens are drawn from a seed; all else is exact, by enumeration.
A rule sees the drafts and says which token follows, so that it is a transport from sets of drafts
to tokens: the ceiling is the largest mass that a transport can put on tokens of the set, a linear
programme (Z. Sun et al., arXiv 2310.15141). There is one for drafts with replacement, as MCSD and
SpecTr draw them, and one without, as RSD does.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from mmaccel.outputs.whole_files import write_whole
from mmaccel.samplers.trees.siblings.spectr import solve_gamma

Sets = dict[frozenset[int], float]  # tokens that were drawn -> probability


def draw_sets(q: np.ndarray, k: int, replaced: bool) -> Sets:
    """The sets of tokens that K draws from q `[V]` give, in any order."""
    found: Sets = {}
    choices = product(range(len(q)), repeat=k) if replaced else permutations(range(len(q)), k)
    for tokens in choices:
        chance = 1.0
        left = 1.0
        for token in tokens:
            chance *= q[token] / left
            if not replaced:
                left -= q[token]
        key = frozenset(tokens)
        found[key] = found.get(key, 0.0) + chance
    return found


def ceiling(p: np.ndarray, sets: Sets) -> float:
    """The most that a transport accepts: mass on the tokens of the set that was drawn.

    Args:
        p: `[V]`, the distribution that the tokens must have.
        sets: drawn, and how often.
    """
    pairs = [(s, token) for s, tokens in enumerate(sets) for token in tokens]
    of_set, tokens = np.array(pairs).T
    column = np.arange(len(pairs))
    # a row for each set, whose mass is spent once, and one for each token, which has p at most
    rows = np.concatenate([of_set, len(sets) + tokens])
    columns = np.concatenate([column, column])
    shape = (len(sets) + len(p), len(pairs))
    bounds = coo_matrix((np.ones(len(rows)), (rows, columns)), shape=shape)
    limits = np.concatenate([list(sets.values()), p])
    found = linprog(-np.ones(len(pairs)), A_ub=bounds.tocsr(), b_ub=limits, method="highs")
    return float(-found.fun)


def accepted_by_rsd(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """The chance that `mmaccel.RSD` accepts one of K drafts."""
    if k == 0 or q.sum() == 0:
        return 0.0
    q = q / q.sum()
    rest = np.clip(p - q, 0, None)
    total = 0.0
    for token in np.flatnonzero(q):
        taken = min(q[token], p[token])
        total += taken
        if q[token] > taken and rest.sum() > 0:
            others = q.copy()
            others[token] = 0.0
            total += (q[token] - taken) * accepted_by_rsd(rest / rest.sum(), others, k - 1)
    return total


def accepted_by_mcsd(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """The chance that `mmaccel.MCSD` accepts one of K drafts."""
    missed = 1.0
    for _ in range(k):
        missed *= 1 - np.minimum(p, q).sum()
        rest = np.clip(p - q, 0, None)
        if rest.sum() == 0:
            return 1.0
        p = rest / rest.sum()
    return 1 - missed


def accepted_by_spectr(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """The chance that `mmaccel.SpecTr` accepts one of K drafts."""
    p_target, p_draft = (torch.from_numpy(each)[None] for each in (p, q))
    gamma = float(solve_gamma(p_target, p_draft, torch.tensor([[k]])))
    return 1 - (1 - np.minimum(q, p / gamma).sum()) ** k


def measure(p: np.ndarray, q: np.ndarray, k: int) -> dict[str, float]:
    """All chances of one pair."""
    return {
        "mcsd": accepted_by_mcsd(p, q, k),
        "spectr": accepted_by_spectr(p, q, k),
        "ceiling_with": ceiling(p, draw_sets(q, k, replaced=True)),
        "rsd": accepted_by_rsd(p, q, k),
        "ceiling_without": ceiling(p, draw_sets(q, k, replaced=False)),
    }


def draw_pairs(n: int, size: int, spread: float, gap: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs of p and q over `size` tokens.

    Args:
        n: how many.
        size: V.
        spread: standard deviation of the logits of p.
        gap: that of the difference of the logits of q to them.
    """
    generator = np.random.default_rng(0)
    pairs = []
    for _ in range(n):
        logits = spread * generator.standard_normal(size)
        others = logits + gap * generator.standard_normal(size)
        p, q = (np.exp(each) / np.exp(each).sum() for each in (logits, others))
        pairs.append((p, q))
    return pairs


def main() -> None:
    """Measure, print a line for each row, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, spread, gap in (("peaked", 3.0, 1.0), ("flat", 0.5, 1.0), ("unlike", 1.5, 2.5)):
        pairs = draw_pairs(given.pairs, given.size, spread, gap)
        for k in (1, 2, 3, 4):
            found = [measure(p, q, k) for p, q in pairs]
            means = {key: float(np.mean([each[key] for each in found])) for key in found[0]}
            rows.append({"pairs": name, "spread": spread, "gap": gap, "k": k, **means})
            print(rows[-1], flush=True)
    if given.json is not None:
        report = {
            "command": shlex.join(["python", *sys.argv]),
            "pairs": given.pairs,
            "size": given.size,
            "siblings": rows,
        }
        text = json.dumps(report, indent=1) + "\n"
        write_whole(given.json, lambda path: path.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
