"""Whole runs through the interpreted kernels: the same seed gives the same tokens as in torch."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel import (
    Autoregressive,
    CausalLMWindow,
    Grid,
    Jacobi,
    Noise,
    QuantizedCache,
    Quest,
    SamplingParams,
    SpeculativeJacobi,
)
from mmaccel.contracts import Pass
from mmaccel.kernels import dispatch
from mmaccel.pipelines.hosts.causal_lm import self_check
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.policies import Policy
from mmaccel.results import Generation
from tests.exactness.test_coarse_graphs import make_coarse
from tests.fixtures.fused_lms import build_decoder
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt
from tests.layers.test_sparse import SELECTORS, run_passes

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1 from the start; scripts/test.sh runs it in its own process",
)

SIZE = 600  # more than a block of `sample`
FUSED = ("add_norm", "rope_write", "gated_act", "row_product")
BLOCKS = ("block_scores", "choose_blocks")
PACKED = ("pack_group", "packed_attention")
EVERY_PASS = ("window_inputs", "accept_prefix")
GRID = Grid(rows=1, width=3, vocab_size=SIZE, tokens=(10, SIZE), row_end=5)
RUNS: list[tuple[Policy, dict[str, Any], Grid | None]] = [
    (Autoregressive(), {}, None),
    (Jacobi(window=3), {"temperature": 0.0}, None),
    (Jacobi(window=3), {"guidance_scale": 2.0, "top_k": 15, "temperature": 1.2}, GRID),
    (Jacobi(window=3, drafts="above"), {"top_p": 0.1, "min_p": 0.01}, GRID),
    (SpeculativeJacobi(window=3), {}, None),
    (SpeculativeJacobi(window=3), {"guidance_scale": 1.5, "top_k": 15}, GRID),
]
ATTENDS = 1  # the run in which attention is interpreted too


def decode(
    policy: Policy,
    options: dict[str, Any],
    grid: Grid | None,
    model: Any = None,
    methods: LayerMethods | None = None,
) -> Generation:
    attention: Any = "auto" if (policy, options) == RUNS[ATTENDS][:2] else "model"
    length = 8 if grid is None else grid.frame
    if model is None:
        model, length = build_lm("llama", vocab_size=SIZE), min(length, 5)
    window = CausalLMWindow(model, attention=attention)
    window.use_methods(methods or LayerMethods())
    rows = [[5, 590, 11], [7], [8, 1], [44]][: 4 if "guidance_scale" in options else 2]
    branches = len(rows) // 2
    prompt = make_prompt(rows, branches, layout=grid)
    noise = Noise.from_seed([3, 2**64 - 4], 2)
    return policy.sample(window, prompt, length, params=SamplingParams(**options), noise=noise)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels' functions that are called from now on."""
    launched: list[str] = []
    chosen = ("sample", "couple", "window_attention", "coarse_rounds", *BLOCKS, *PACKED)
    for kernel in (*chosen, *FUSED, *EVERY_PASS):
        module, name = import_module(f"mmaccel.kernels.{kernel}_triton"), dispatch.KERNELS[kernel]
        real = getattr(module, name)

        def spy(*args: Any, _real: Any = real, _name: str = name, **options: Any) -> Any:
            launched.append(_name)
            return _real(*args, **options)

        monkeypatch.setattr(module, name, spy)
    return launched


@pytest.mark.parametrize(("policy", "options", "grid"), RUNS)
def test_same_seed_same_tokens(
    policy: Policy, options: dict[str, Any], grid: Grid | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    expected = decode(policy, options, grid)
    launched = watch(monkeypatch)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    made = decode(policy, options, grid)
    assert torch.equal(made.tokens, expected.tokens) and torch.equal(made.passes, expected.passes)
    attends = made.stats.attention == "window_attention"
    assert attends == ((policy, options) == RUNS[ATTENDS][:2])
    wanted = {"couple" if isinstance(policy, SpeculativeJacobi) else "sample_frozen", *EVERY_PASS}
    wanted |= {"window_attention"} if attends else set()
    assert set(launched) == wanted
    assert min(map(launched.count, wanted)) >= made.stats.passes


BY_KERNELS = [(name, method) for name, method in SELECTORS if method.summary is not None]


@pytest.mark.parametrize(("name", "method"), BY_KERNELS)
def test_blocks_are_those_of_brute_force(
    name: str, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of changing width that roll back; the first one has no prompt to begin with."""
    launched = watch(monkeypatch)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    run_passes(name, method)
    assert [launched.count(kernel) for kernel in BLOCKS] == [4, 4]


@pytest.mark.parametrize(
    ("methods", "kernels"),
    [
        (LayerMethods(attention=Quest(budget=0.3, block=1, first_layer=0)), BLOCKS),
        (LayerMethods(kv_cache=QuantizedCache(group=4, residual=3)), PACKED),
    ],
)
def test_methods_in_layers_that_attend_by_kernels(
    methods: LayerMethods, kernels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, options, _ = RUNS[ATTENDS]
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    expected = decode(policy, options, None, None, methods)
    launched = watch(monkeypatch)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    made = decode(policy, options, None, None, methods)
    assert torch.equal(made.tokens, expected.tokens)
    assert set(launched) >= {*kernels, "window_attention"}


@pytest.mark.parametrize("rounds", [None, 2])
@pytest.mark.parametrize(("index", "options"), [(0, {}), (1, {})])
def test_coarse_drafts(
    index: int,
    options: dict[str, Any],
    rounds: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call a pass: the tokens and the passes of rounds in torch."""
    model = build_lm("llama", vocab_size=SIZE)
    source = replace(make_coarse(model, tmp_path), rounds=rounds)
    policy = (Jacobi(4, source), SpeculativeJacobi(4, "gumbel", source))[index]
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    expected = decode(policy, options, None, model)
    launched = watch(monkeypatch)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    made = decode(policy, options, None, model)
    assert torch.equal(made.tokens, expected.tokens) and torch.equal(made.passes, expected.passes)
    narrow = 2  # the first pass, and a last one of a single slot, correct nothing
    launches = launched.count("coarse_rounds")
    assert made.stats.passes >= launches >= made.stats.passes - narrow > 1


# add_norm, gated_act and row_product in a pass, of every form that rope_write and they have
LAUNCHED = {"llama": (5, 2, 0), "llama, triton": (1, 0, 8), "gemma3, triton": (5, 2, 0),
            "olmo2": (5, 2, 0), "gpt_neox": (5, 0, 0), "opt": (5, 0, 0),
            "cohere with norms of heads": (3, 2, 0)}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHED)
def test_the_fused_decoder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass by the interpreted kernels: the logits of the model's own forward."""
    kind, _, mode = name.partition(", ")
    monkeypatch.setenv(dispatch.VARIABLE, mode or "auto")
    window = CausalLMWindow(build_decoder(kind), attention="model", fused=True)
    window.choose_route()  # its self-check runs the kernels too
    launched = watch(monkeypatch)
    tokens, start = torch.tensor([[5, 9], [7, 8]]), torch.tensor([0, 0])
    logits = []
    for fused in (False, True):
        window.setup.fused = fused
        window.reserve(2, 4)
        logits.append(window.forward(Pass(tokens, start)))
        assert bool(launched) == fused
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert launched.count("rope_write") == 2
    counts = tuple(launched.count(kernel) for kernel in ("add_norm", "gated_act", "row_product"))
    assert counts == LAUNCHED[name]


def test_bits_of_a_row_depend_on_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of one tile, and attention in one split, of prompts too; as it is found."""
    monkeypatch.setattr(self_check, "HISTORY", 5)
    monkeypatch.setattr(self_check, "WIDEST", 8)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    given: list[tuple[str, Any]] = []
    for kernel, option in (("row_product", "same_bits"), ("window_attention", "num_splits")):
        module = import_module(f"mmaccel.kernels.{kernel}_triton")
        real = getattr(module, kernel)

        def spy(*args: Any, _real: Any = real, _option: str = option, **options: Any) -> Any:
            given.append((_option, options.get(_option)))
            return _real(*args, **options)

        monkeypatch.setattr(module, kernel, spy)
    window = CausalLMWindow(build_decoder("llama"), attention="auto", fused="exact")
    window.choose_route()  # finds other bits, were there some
    ids = torch.tensor([[5, 9, 4], [7, 8, 2]])
    given.clear()
    made = []
    for rows, widths, is_prompt in ((1, (1, 1, 1), False), (2, (3,), False), (2, (2, 1), True)):
        window.reserve(rows, 4)
        start = torch.zeros(rows, dtype=torch.int64)
        for part in ids[:rows].split(widths, 1):
            entries = Pass(part, start)
            if is_prompt and part.shape[1] > 1:
                window.prefill(entries)
            else:
                logits = window.forward(entries)
            start = start + part.shape[1]
        made.append(logits[0, -1])
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
    assert window.forwards.same_bits
    assert set(given) == {("same_bits", True), ("num_splits", 1)}
    assert len(given) == 6 * 2 * 5 + 5  # passes, layers, products and attention; heads
