"""Beginnings of held-out modules, as prompts for `stdlib`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmaccel.demo.stdlib.modules import Module, read_modules

EVALUATION_SEED = 41


def held_out_modules(shortest: int = 0) -> list[Module]:
    """The modules that no model was trained on, in the order of their names.

    Args:
        shortest: bytes; shorter ones are left out.
    """
    modules = [module for module in read_modules() if module.is_held_out]
    return [module for module in modules if len(module.text.encode()) >= shortest]


def make_prompts(
    tokenizer: Any, count: int, length: int, seed: int = EVALUATION_SEED
) -> list[list[int]]:
    """Pieces of held-out modules, each beginning with a line.

    Args:
        tokenizer: of `mmaccel.load_demo("stdlib")`.
        count: how many.
        length: tokens of each, that of its beginning included.
        seed: of the choice.

    Returns:
        `count` lists of `length` ids.
    """
    rng = np.random.default_rng(seed)
    modules = held_out_modules(shortest=8 * length)
    prompts: list[list[int]] = []
    while len(prompts) < count:
        lines = modules[rng.integers(len(modules))].text.splitlines(keepends=True)
        first = int(rng.integers(len(lines)))
        ids = tokenizer("".join(lines[first : first + length]), verbose=False)["input_ids"]
        if len(ids) >= length:
            prompts.append(ids[:length])
    return prompts
