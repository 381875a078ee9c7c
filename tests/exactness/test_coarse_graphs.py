"""Captured passes with coarse drafts: what a graph holds of C, and when it is captured anew."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import (
    MCSD,
    CausalLMWindow,
    Coarse,
    Comb,
    DySpec,
    GroupedSpeculative,
    Jacobi,
    Sequoia,
    SpecTr,
    SpeculativeJacobi,
)
from mmaccel.kernels import dispatch
from mmaccel.pipelines.runner.cuda_graphs import GraphCache
from mmaccel.pipelines.runner.engine import is_capturable
from mmaccel.policies import Policy
from mmaccel.results import Generation
from mmaccel.samplers.drafting.coarse_drafter import CoarseDrafter
from mmaccel.samplers.drafting.coarse_model import (
    FOLDER,
    TEXT_NEIGHBOURS,
    CoarseConfig,
    CoarseModel,
    save_coarse,
)
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.step_runner import StepRunner
from mmaccel.samplers.window.window_size import FixedWidth
from tests.exactness.test_graph_reuse import CALLS, Call, assert_like
from tests.fixtures.fake_device import same
from tests.fixtures.graph_replay import Replay
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt


def make_coarse(model: Any, folder: Path, seed: int = 0) -> Coarse:
    """A folder with a coarse model of strong random weights."""
    output = model.get_output_embeddings().weight
    torch.manual_seed(seed)
    config = CoarseConfig(*output.shape, TEXT_NEIGHBOURS, embedding=8, width=16)
    coarse = CoarseModel(config, output)
    with torch.no_grad():
        for weight in coarse.parameters():
            weight.mul_(2)
    save_coarse(coarse, folder, {})
    return Coarse(str(folder))


class Calls:
    """Calls over one window, captured or pass by pass."""

    def __init__(self, model: Any, fused: bool = False) -> None:
        self.window = CausalLMWindow(model, fused=fused)

    def run(self, policy: Policy, call: Call, runner: StepRunner) -> Generation:
        rows = [list(row) for row in call.rows]
        guided = "guidance_scale" in call.params
        rows += [[*row[::-1], 4] for row in rows] if guided else []
        prompt = make_prompt(rows, 1 + guided, layout=call.layout)
        self.window.setup.runner = runner
        return policy.sample(
            self.window, prompt, call.length, params=SamplingParams(**call.params),
            noise=Noise.from_seed(call.seeds, len(call.seeds)),
        )  # fmt: skip

    def check(self, policy: Policy, call: Call, cache: GraphCache, sync_every: int = 1) -> int:
        """Compare a captured call with its eager run; how many passes it captured."""
        made = self.run(policy, call, Replay(sync_every, cache))
        assert_like(made, self.run(policy, call, StepRunner()))
        return made.stats.captures


@pytest.fixture(scope="module")
def model() -> Any:
    return build_lm("llama")


@pytest.fixture(scope="module")
def source(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Coarse:
    return make_coarse(model, tmp_path_factory.mktemp("coarse"))


def policies(source: Coarse) -> list[Policy]:
    return [
        Jacobi(6, source),
        SpeculativeJacobi(5, drafts=source),
        SpeculativeJacobi(5, "gumbel", source),
        GroupedSpeculative(5, 3, drafts=source),
        SpeculativeJacobi(6, drafts=replace(source, rounds=2)),
        Jacobi(7, replace(source, rounds=3)),
    ]


def test_the_adaptive_window(model: Any, source: Coarse) -> None:
    """Every width is captured once, and a sweep reads what a pass of another width recorded."""
    cache, calls, widths = GraphCache(), Calls(model), []
    for call in CALLS * 2:
        made = calls.run(Jacobi("adaptive", source), call, Replay(1, cache))
        plain = calls.run(Jacobi(8, "neighbour"), call, StepRunner())
        assert made.tokens.equal(plain.tokens)
        widths.append(made.stats.captures)
    assert 2 <= sum(widths) <= 5 and len(cache) == 1


def test_a_wide_sweep_after_a_narrow_pass(
    model: Any, source: Coarse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held tensors are as wide as the widest window: a sweep reads no slot that no pass had."""
    base, read, widths = CoarseModel.base, [], cycle((2, 6, 3))

    def watch(self: CoarseModel, slots: Tensor, distances: Tensor, states: Tensor, *rest: Tensor):
        read.append((float(states.abs().sum(-1).min()), int(distances.max())))
        return base(self, slots, distances, states, *rest)

    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    monkeypatch.setattr(FixedWidth, "choose", lambda _, most: min(next(widths), most))
    monkeypatch.setattr(CoarseModel, "base", watch)
    Calls(model).run(Jacobi(12, source), CALLS[0], StepRunner())
    assert len(read) > 5 and min(read)[0] > 0  # zeros are what a narrow pass is filled up with
    # two slots seen, at least one accepted, and the last draft of a window of 6 is the fifth slot
    assert 4 <= max(distance for _, distance in read) <= 5


TREES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (Jacobi(7), {"tree": Comb(3, 2)}),
    (Jacobi(7), {"tree": DySpec(6, depth=2)}),
    (SpeculativeJacobi(6), {"tree": Comb(4, 2)}),
    (SpeculativeJacobi(6), {"tree": Sequoia(6, depth=2), "siblings": MCSD()}),
    (SpeculativeJacobi(6, "gumbel"), {"tree": Comb(3, 1), "siblings": SpecTr()}),
)


@pytest.mark.parametrize(("policy", "tree"), TREES, ids=repr)
def test_trees(
    policy: Any, tree: dict[str, Any], model: Any, source: Coarse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed passes walk them as eager ones do."""
    own = replace(policy, drafts=source, **tree)
    cache, calls = GraphCache(), Calls(model)
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    assert is_capturable(own)
    assert [calls.check(own, call, cache) for call in CALLS[:2]] == [1, 0]


@pytest.mark.parametrize("index", [4, 5])
def test_parallel_rounds(index: int, model: Any, source: Coarse) -> None:
    """A captured run is its eager one; rounds are as many in every pass."""
    cache, calls = GraphCache(), Calls(model)
    for call in CALLS[:2]:
        calls.check(policies(source)[index], call, cache)


def test_a_graph_belongs_to_its_coarse_model(model: Any, tmp_path: Path) -> None:
    """Without C, with another folder's, and with new weights in a folder: captured anew."""
    first, other = (make_coarse(model, tmp_path / name, k) for k, name in enumerate("ab"))
    cache, calls = GraphCache(), Calls(model)
    neighbour = Jacobi(6, "neighbour")
    sources = (Jacobi(6, first), neighbour, Jacobi(6, first), Jacobi(6, other), Jacobi(6, other))
    assert [calls.check(policy, CALLS[0], cache) for policy in sources] == [1, 1, 0, 1, 0]
    make_coarse(model, tmp_path / "b", 2)
    os.utime(tmp_path / "b" / FOLDER.weights, ns=(1, 1))
    assert [calls.check(Jacobi(6, other), CALLS[0], cache) for _ in range(2)] == [1, 0]


def test_a_coarse_model_that_is_gone_leaves_no_graphs(model: Any, source: Coarse) -> None:
    """Their addresses may belong to something else by then."""
    cache = GraphCache()
    Calls(model).check(Jacobi(6, source), CALLS[0], cache)
    assert len(cache) == 1  # its window, which held C, is gone
    Calls(model).check(Jacobi(6, "neighbour"), CALLS[0], cache)
    assert len(cache) == 1


def test_drafts_come_from_the_graph_that_was_captured(
    model: Any, source: Coarse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay sweeps without Python: C's function is not called, and drafts are C's."""
    calls, cache, swept = Calls(model), GraphCache(), []
    real = CoarseDrafter.redraft
    monkeypatch.setattr(CoarseDrafter, "redraft", lambda *args: (swept.append(1), real(*args))[1])
    made = [calls.run(Jacobi(6, source), CALLS[0], Replay(1, cache)) for _ in range(2)]
    assert made[0].stats.passes == made[1].stats.passes > 4
    assert len(swept) == 3 + 1  # eager, to warm up, recorded; the second run's first pass
    plain = calls.run(Jacobi(6, "neighbour"), CALLS[0], StepRunner())
    assert plain.stats.passes != made[0].stats.passes and plain.tokens.equal(made[0].tokens)


@pytest.mark.parametrize("index", [0, 1, 2, 4, 5])
def test_on_another_device(index: int, tmp_path: Path) -> None:
    """No operation of a sweep mixes devices, and none needs the host."""

    def make(device: Any) -> Tensor:
        own = build_lm("llama").to(device)
        source = make_coarse(own, tmp_path)
        noise = Noise.from_seed([3, 4], 2, device)
        prompt = make_prompt([[5, 9, 11, 2], [7]])
        prompt = replace(prompt, tokens=prompt.tokens.to(device), lengths=prompt.lengths.to(device))
        made = policies(source)[index].sample(
            CausalLMWindow(own), prompt, 28, params=SamplingParams(), noise=noise
        )
        return made.tokens

    assert same(make)
