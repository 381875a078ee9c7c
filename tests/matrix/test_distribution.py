"""Every window policy that declares the plain loop's distribution, against an enumerated language.

Relaxed ones too, with the settings that relax nothing. Each class of policies meets every setting
and every draft source that it takes; its policies share them out.

Power: the rows of one batch, rejected at p < 1e-4. Whatever its direction, a deviation of 0.03 in
total variation (over the pooled cells) is rejected with probability 0.99 or more; `measure` asserts
that for the rows and degrees of freedom at hand. Seeds are fixed, so nothing flakes.
`tests/exactness/test_the_test.py` plants the bugs that must be rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.catalog import POLICIES, load
from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.draft_model import DraftModel
from mmaccel.samplers.drafting.sources import SOURCES
from mmaccel.tokenizers_vq.grid import Grid
from tests.fixtures.coarse import strong_coarse
from tests.fixtures.lanes import fast_first
from tests.fixtures.toy_distribution import SETTINGS, Setting, assert_exact
from tests.matrix.examples import Target, has_field, identities, make, names

WINDOWS = (3, 2, 4, 8)
EXACT = [name for name in names("policies", "window") if name == "autoregressive" or
         load(POLICIES[name].target).exactness == "distribution"]  # fmt: skip
RELAXED = [name for name in names("policies", "window")
           if load(POLICIES[name].target).exactness == "relaxed"]  # fmt: skip


def needs_rows(policy: str) -> bool:
    """Whether a policy decodes nothing but rows."""
    return bool(load(POLICIES[policy].target).needs_rows)


def fits(drafts: str, setting: Setting) -> bool:
    """Whether a source may draft for a policy that is not bitwise, in the setting's layout."""
    source = SOURCES.get(drafts, DraftModel)
    if source.only_bitwise or source is DraftModel:
        return not source.only_bitwise
    try:
        source().check_layout(setting.grid)
    except OptionError:
        return False
    return True


def taken(policy: str) -> list[str]:
    """The draft sources that a policy takes."""
    corrects = getattr(load(POLICIES[policy].target), "takes_corrections", True)
    sources = {each: SOURCES.get(each, DraftModel) for each in names("drafts")}
    return [each for each, source in sources.items() if corrects or not source.corrects]


def cells() -> Iterator[tuple[str, str, str, int]]:
    """Policy, setting, draft source and window; sources that the policy's class used least come
    first.
    """
    counts: dict[str, Counter[str]] = {}
    takes = {policy: POLICIES[policy].target for policy in EXACT if has_field(policy, "drafts")}
    for number, policy in enumerate(EXACT):
        used = counts.setdefault(takes.get(policy, policy), Counter())
        n_sources = 0
        if policy in takes:
            n_sources = -(-len(taken(policy)) // list(takes.values()).count(takes[policy]))
        met = [*SETTINGS.items()]
        if list(takes.values()).count(takes.get(policy)) > 1:  # couplings of one class
            met = met[number % 2 :: 2]
        again = islice(cycle(met), max(len(met), n_sources))
        for turn, (name, setting) in enumerate(again):
            sources = [each for each in taken(policy) if fits(each, setting)]
            sources = sources[number % 3 :] + sources[: number % 3]
            drafts = min(sources, key=lambda each: used[each])
            used[drafts] += 1
            yield policy, name, drafts if policy in takes else "", WINDOWS[(turn + number) % 4]


def check(policy: str, setting: Setting, drafts: str, folder: Path, **given: Any) -> None:
    """A policy with a source, in a setting."""
    model: Any = setting.language()
    target = Target(model, setting.language(seed=2))
    if drafts:
        given["drafts"] = make("drafts", drafts, target)
        strong_coarse(torch.eye(setting.vocab_size), folder, neighbours=((0, 0, -1), (0, 0, -2)))
        model.coarse = folder
    assert_exact(make("policies", policy, target, **given), setting, model=model)


@pytest.mark.parametrize(  # fast: each class of policies in one setting
    ("policy", "name", "drafts", "window"),
    fast_first(cells(), lambda cell: {POLICIES[cell[0]].target}),
)
def test_the_distribution(policy: str, name: str, drafts: str, window: int, tmp_path: Path) -> None:
    given = {"window": window} if has_field(policy, "window") else {}
    setting = SETTINGS[name]
    if drafts in ("stand", "aded", "lookahead", "source-text", "moved-frame"):  # quicker in parts
        setting = replace(setting, batch=2000)
    check(policy, setting, drafts, tmp_path, **given)


@pytest.mark.parametrize("policy", RELAXED)
def test_without_relaxation_it_is_the_plain_loops(policy: str, tmp_path: Path) -> None:
    second = "token-recycling" if load(POLICIES[policy].target).takes_guesses else "left"
    drafts = ("neighbour", second, "coarse")
    grid = Grid(rows=2, width=3, vocab_size=3) if needs_rows(policy) else None
    for given in identities("policies", policy):
        for source, name in zip(drafts, ("plain", "guided", "hot, top-k"), strict=True):
            setting = replace(SETTINGS[name], grid=grid)
            check(policy, setting, source, tmp_path, window=3, **given)


def test_every_source_of_every_class_is_tried() -> None:
    found = {(POLICIES[policy].target, drafts) for policy, _, drafts, _ in cells()}
    for policy in (each for each in EXACT if has_field(each, "drafts")):
        wanted = [each for each in taken(policy) if fits(each, SETTINGS["rows"])]
        target = POLICIES[policy].target
        assert [each for each in wanted if (target, each) not in found] == []
