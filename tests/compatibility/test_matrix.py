"""What holds for every model of the table: tokens, rows, seeds, devices, pickles, no traces.

A cell is a row of `models.py`. It names the model and what differs.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import mmaccel
from tests.compatibility.measure import check_batch, policies
from tests.compatibility.models import Row, rows
from tests.compatibility.test_compatibility import REPORT
from tests.fixtures.fake_device import same as same_on_fake_device
from tests.fixtures.lanes import every
from tests.fixtures.shared import new_folder
from tests.fixtures.tiny_vlms import encodes_first
from tests.fixtures.traces import outline_of, parts_of

ROWS = [row for row in rows() if encodes_first() or not row.has_images]
ATTACHED = [row for row in ROWS if row.section != "pipelines"]
PIPELINES = [row for row in ROWS if row.section == "pipelines"]
MORE: dict[str, Sequence[Any]] = {  # policies of a row, next to the fast one
    "gemma3_text": (mmaccel.SpeculativeJacobi(4), mmaccel.Speculative(3)),
    "gpt2": (mmaccel.SpeculativeJacobi(4), mmaccel.GroupedSpeculative()),
    "imagegpt": (mmaccel.SpeculativeJacobi(5),),
    "emu3": (mmaccel.SpeculativeJacobi(5),),
    "glm_image": (mmaccel.SpeculativeJacobi(5),),
    "janus": (mmaccel.SpeculativeJacobi(5),),
    "scale-words": (mmaccel.LosslessUnmask(3), mmaccel.EntropyBounded(1.0)),
    "sdar": (mmaccel.RevisedParallel(0.1), mmaccel.LosslessUnmask(3, cache="block")),
    "MaskedLM": (mmaccel.RevisedParallel(0.1), mmaccel.LosslessUnmask(3, cache="block")),
    "Fast_dLLM_Qwen": (mmaccel.LosslessUnmask(3, cache="block"),),
    "LLaDA2Pipeline": (mmaccel.EntropyBounded(0.5),),
    "DiffusionGemmaPipeline": (mmaccel.EntropyBounded(0.1),),
}


def name_of(row: Row) -> str:
    return f"{row.section}-{row.title}-{row.name}"


def each(chosen: list[Row], step: int = 1) -> Any:
    """A test for rows, of which every `step`-th is in the fast run."""
    return pytest.mark.parametrize("row", every(step, chosen), ids=name_of)


@cache
def shared(row: Row) -> Any:
    """A row's model for all tests, which leave it as it was."""
    return row.build(new_folder(row.name))


def assert_same(made: Any, expected: Any, what: object) -> None:
    for k, (one, other) in enumerate(zip(made[0], expected[0], strict=True)):
        assert one.equal(other), f"row {k} has other tokens under {what}"


@each(ROWS, 3)
def test_a_policy_makes_the_plain_loops_tokens(row: Row) -> None:
    target = shared(row)
    plain, fast = policies(target)
    expected, made = row.call(target, plain, 3), row.call(target, fast, 3)
    assert_same(made, expected, fast)
    assert made[1].exactness == "bitwise" and made[1].tokens == expected[1].tokens
    assert check_batch(row, target) == "yes"
    (recorded,) = [each for each in REPORT["compatibility"] if each["title"] == row.title
                   and each["name"] == row.name and each["section"] == row.section]  # fmt: skip
    assert (recorded["policy"], recorded["batch"]) == (type(fast).__name__, "yes")


@each(ROWS[::4], 3)
def test_without_a_seed_torchs_generator_draws_one(row: Row) -> None:
    target = shared(row)
    _, fast = policies(target)
    torch.manual_seed(2)
    first, second = (row.call(target, fast, 2, seed=None) for _ in range(2))
    assert isinstance(first[1].seed, int) and first[1].seed != second[1].seed
    torch.manual_seed(2)
    assert_same(row.call(target, fast, 2, seed=None), first, "torch's seed again")
    assert_same(row.call(target, fast, 2, seed=second[1].seed), second, "its own seed")


class OwnOnMeta(TorchFunctionMode):
    """The default device "meta", for tensors that our own sources create: they have no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func in _device_constructors() and options.get("device") is None:
            if sys._getframe(1).f_globals["__name__"].startswith("mmaccel."):
                options = options | {"device": "meta"}
        return func(*args, **options)


@each(ROWS, 8)
def test_another_default_device_changes_nothing(row: Row) -> None:
    """The self-check of a fresh model runs there too."""
    target = row.build(new_folder(row.name))
    for policy in (policies(shared(row))[1], *MORE.get(row.name, ())):
        with OwnOnMeta():
            made = row.call(target, policy, 2)
        assert all(tokens.device.type == "cpu" for tokens in made[0])
        assert_same(made, row.call(target, policy, 2), policy)


@each([row for row in ATTACHED if not row.has_images], 8)
def test_a_fake_accelerator_changes_nothing(row: Row) -> None:
    """No operation mixes devices, and the tokens are the CPU's."""
    for policy in (policies(shared(row))[1], *MORE.get(row.name, ())):

        def make(device: Any, policy: Any = policy) -> Tensor:
            target = row.build(new_folder(row.name))
            for name, part in parts_of(target).items():
                if isinstance(part, nn.Module) and "." not in name:
                    part.to(device)
            made, _ = row.call(target, policy, 2)
            return torch.cat([tokens.flatten() for tokens in made])

        assert same_on_fake_device(make), policy


@each(ATTACHED, 3)
def test_detaching_leaves_no_trace(row: Row) -> None:
    target = shared(row)
    plain, fast = policies(target)
    row.call(target, plain, 1)  # with what a first call leaves, as its self-check
    kind, before = type(target), outline_of(target)
    with mmaccel.attach(target, fast):
        assert type(target) is not kind and isinstance(target, kind)
        assert type(copy.copy(target)) is kind
        with pytest.raises(mmaccel.AttachError, match="detach"):
            mmaccel.attach(target, plain)
    row.call(target, fast, 1)
    after = outline_of(target)
    assert before.keys() == after.keys() and type(target) is kind
    assert [name for name in before if before[name] != after[name]] == []


@each([row for row in PIPELINES if row.name != "orpheus"], 5)  # whose codec torch does not pickle
def test_a_pipeline_that_was_used_can_be_pickled(row: Row) -> None:
    target = shared(row)
    _, fast = policies(target)
    expected = row.call(target, fast, 1)
    assert_same(row.call(pickle.loads(pickle.dumps(target)), fast, 1), expected, "its pickle")
    assert_same(row.call(target, fast, 1), expected, "the pipeline itself")
