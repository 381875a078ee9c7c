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

from mmaccel import CausalLMWindow, Coarse, Jacobi, Noise, SamplingParams
from mmaccel.kernels import dispatch
from mmaccel.pipelines.hosts.runner.cuda_graphs import GraphCache
from mmaccel.samplers.drafting.coarse_model import (
    FOLDER,
    TEXT_NEIGHBOURS,
    CoarseConfig,
    CoarseModel,
    save_coarse,
)
from mmaccel.samplers.window.window_size import FixedWidth
from tests.exactness.test_graph_reuse import CALLS, check, decode
from tests.fixtures.fake_device import same
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


@pytest.fixture(scope="module")
def model() -> Any:
    return build_lm("llama")


@pytest.fixture(scope="module")
def source(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Coarse:
    return make_coarse(model, tmp_path_factory.mktemp("coarse"))


@pytest.mark.slow
def test_the_adaptive_window(model: Any, source: Coarse) -> None:
    """Every width is captured once, and a sweep reads what a pass of another width recorded."""
    cache, window, widths = GraphCache(), CausalLMWindow(model), []
    for call in CALLS * 2:
        call = replace(call, layout=None)  # whose widths are chosen pass by pass
        made = decode(Jacobi("adaptive", source), call, cache, window=window)
        plain = decode(Jacobi(8, "neighbour"), call, None, window=window)
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
    decode(Jacobi(12, source), CALLS[0], None, model)
    assert len(read) > 5 and min(read)[0] > 0  # zeros are what a narrow pass is filled up with
    # two slots seen, at least one accepted, and the last draft of a window of 6 is the fifth slot
    assert 4 <= max(distance for _, distance in read) <= 5


def test_a_graph_belongs_to_its_coarse_model(model: Any, tmp_path: Path) -> None:
    """Without C, with another folder's, and with new weights in a folder: captured anew."""
    first, other = (make_coarse(model, tmp_path / name, k) for k, name in enumerate("ab"))
    cache, window = GraphCache(), CausalLMWindow(model)
    neighbour = Jacobi(6, "neighbour")
    for policy, captures in (
        (Jacobi(6, first), 1),
        (neighbour, 1),
        (Jacobi(6, first), 0),
        (Jacobi(6, other), 1),
        (Jacobi(6, other), 0),
    ):
        check(CALLS[0], cache, model, captures, policy, window=window)
    make_coarse(model, tmp_path / "b", 2)
    os.utime(tmp_path / "b" / FOLDER.weights, ns=(1, 1))
    for captures in (1, 0):
        check(CALLS[0], cache, model, captures, Jacobi(6, other), window=window)


def test_a_coarse_model_that_is_gone_leaves_no_graphs(model: Any, source: Coarse) -> None:
    """Their addresses may belong to something else by then."""
    cache = GraphCache()
    for drafts in (source, "neighbour"):  # the window of the first, which held C, is gone
        check(CALLS[0], cache, model, 1, Jacobi(6, drafts), window=CausalLMWindow(model))
        assert len(cache) == 1


@pytest.mark.slow
def test_on_another_device(tmp_path: Path) -> None:
    """No operation of parallel rounds mixes devices, and none needs the host."""

    def make(device: Any) -> Tensor:
        own = build_lm("llama").to(device)
        policy = Jacobi(7, replace(make_coarse(own, tmp_path), rounds=3))
        prompt = make_prompt([[5, 9, 11, 2], [7]])
        prompt = replace(prompt, tokens=prompt.tokens.to(device), lengths=prompt.lengths.to(device))
        noise = Noise.from_seed([3, 4], 2, device)
        window = CausalLMWindow(own)
        return policy.sample(window, prompt, 28, params=SamplingParams(), noise=noise).tokens

    assert same(make)
