"""A caller's own loop against a reference: do both draw sequences from one distribution?

Two samples are compared by a G-test, prompt by prompt, and the tests add up. Cells are the branches
of a tree of prefixes, as far down as both samples together fill them: that choice sees no labels,
so that the test keeps its level.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import show
from mmaccel.errors import OptionError
from mmaccel.evaluation.exactness.g_test import combine, compare_counts, pool_cells
from mmaccel.evaluation.exactness.report import Check, judge
from mmaccel.samplers.sampling_params import SamplingParams

# From a prompt and a seed to new tokens: a sequence, array or tensor of integers.
Loop = Callable[[Any, int], Any]
# A sequence for each seed, of a prompt by its number.
Draw = Callable[[int, Sequence[int]], list[list[int]]]
SMALLEST = 10  # sequences of a cell, of both samples together


def compare_loops(
    loop: Draw, reference: Draw, n_prompts: int, samples: int, seed: int
) -> Iterator[Check]:
    """Whether a loop has the reference's distribution: one check, of at least so many sequences
    each, equally many of each prompt, with the seeds from `seed` on.
    """
    each = -(-samples // n_prompts)
    if each < SMALLEST:
        raise OptionError(
            f"--samples: expected at least {SMALLEST} for each of {n_prompts} prompts, received "
            f"{samples}; draw more, or give fewer prompts"
        )
    tests = []
    is_varied = False
    for number in range(n_prompts):
        start = seed + number * 2 * each  # tests add up where no two sequences share a seed
        seeds = [(start + k) % 2**64 for k in range(2 * each)]
        first, second = loop(number, seeds[:each]), reference(number, seeds[each:])
        tests.append(compare_counts(*count_cells(first, second)))
        is_varied |= len(set(map(tuple, first + second))) > 1
    total = each * n_prompts
    check = judge("distribution of sequences", combine(tests), total, total / 2, True)
    if is_varied and not check.figures["degrees"]:  # holds whatever was drawn
        said = f"{check.said}; cannot fail: every sequence is rare, ask for shorter ones"
        check = replace(check, guaranteed=False, said=said)
    yield check


def count_cells(first: list[list[int]], second: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Sequences of two samples in each cell of a tree of prefixes, `[K]` int64 each.

    Branches of fewer than `SMALLEST` are pooled; a branch of its own is split further.
    """
    waiting = [(0, [(row, 0) for row in first] + [(row, 1) for row in second])]
    cells = []
    while waiting:
        depth, items = waiting.pop()
        branches: dict[int | None, list[tuple[list[int], int]]] = {}
        for row, side in items:
            token = row[depth] if depth < len(row) else None
            branches.setdefault(token, []).append((row, side))
        # equal branches are pooled by their tokens: by who drew them first, pools would see labels
        order = sorted(branches, key=lambda token: -1 if token is None else token)
        sizes = torch.tensor([len(branches[token]) for token in order], dtype=torch.float64)
        pools: dict[int, list[int | None]] = {}
        for token, pool in zip(order, pool_cells(sizes, SMALLEST).tolist()):
            pools.setdefault(pool, []).append(token)
        for tokens in pools.values():
            members = [item for token in tokens for item in branches[token]]
            if len(tokens) == 1 and tokens[0] is not None:
                waiting.append((depth + 1, members))
            else:
                cells.append([side for _, side in members])
    counts = [[cell.count(side) for cell in cells] for side in (0, 1)]
    first_counts, second_counts = torch.tensor(counts, dtype=torch.int64)
    return first_counts, second_counts


def draw_by(
    loop: Loop, option: str, prompts: Sequence[Any], length: int, ends: Collection[int] = ()
) -> Draw:
    """Sequences of a caller's loop (`option`), up to `length` tokens and to the first of `ends`."""

    def draw(number: int, seeds: Sequence[int]) -> list[list[int]]:
        prompt = prompts[number]
        rows = [
            _read_tokens(loop(copy(prompt), seed), option) for seed in seeds
        ]  # loops may extend
        if isinstance(prompt, list) and prompt and all(r[: len(prompt)] == prompt for r in rows):
            raise OptionError(
                f"{option}: expected new tokens alone, received the prompt with them; return "
                f"tokens[{len(prompt)}:]"
            )
        return [cut(row, length, ends) for row in rows]

    return draw


def _read_tokens(made: Any, option: str) -> list[int]:
    """One sequence that a loop returned, of one axis or of a batch of one."""
    try:
        tokens = torch.as_tensor(made)
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.empty(2, 2, dtype=torch.float32)  # refused below
    is_float = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    if tokens.numel() and (is_float or tokens.numel() != max(tokens.shape, default=1)):
        raise OptionError(
            f"{option}: expected a sequence of integers, received {show(made)}; return the new "
            "tokens"
        )
    return [int(token) for token in tokens.flatten()]


def draw_plain(
    pipe: Any,
    plain: Any,
    params: SamplingParams,
    texts: Sequence[str],
    batch_size: int,
    ends: Collection[int],
) -> Draw:
    """Sequences of a `TextToImage`, of images or texts, by the policy of its plain loop."""

    def draw(number: int, seeds: Sequence[int]) -> list[list[int]]:
        made = pipe.stream(
            [texts[number]] * len(seeds),
            params,
            policy=plain,
            seed=list(seeds),
            batch_size=batch_size,
            has_pixels=False,
        )
        rows = (row for part in made for row in part.tokens.tolist())
        return [cut(row, pipe.length, ends) for row in rows]

    return draw


def cut(tokens: list[int], length: int, ends: Collection[int]) -> list[int]:
    """The first tokens, up to the first that ends the sequence."""
    last = next((k for k, token in enumerate(tokens) if token in ends), length)
    return tokens[: min(last + 1, length)]
