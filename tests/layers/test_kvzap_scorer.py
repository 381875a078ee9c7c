"""KVzap's trained scorers with random weights, against networks on transformers' output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import mmaccel
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.layers.observing import Observer
from mmaccel.reduction.kv_cache import kvzap_scorer
from mmaccel.reduction.kv_cache.contract import LayerSizes
from mmaccel.reduction.kv_cache.kvzap_scorer import Scorer, open_scorer
from tests.fixtures.tiny_lms import build_lm
from tests.layers.masked_model import greedy_rows
from tests.layers.test_eviction import (
    Plans,
    Prompt,
    Rounds,
    check_masks,
    draw_rows,
    generate,
)
from tests.matrix.cells import covering

KINDS = ("linear", "mlp")
BUDGET = 3
THRESHOLDS = {"linear": 0.4, "mlp": 0.1}


def make_networks(kind: str, *, layers: int = 2, heads: int = 2) -> list[Any]:
    """The networks of kvpress' `KVzapModel`, with random weights."""
    torch.manual_seed(5)
    if kind == "linear":
        return [nn.Linear(32, heads) for _ in range(layers)]
    return [
        nn.Sequential(nn.Linear(32, 24), nn.GELU(), nn.Linear(24, heads)) for _ in range(layers)
    ]


def write(folder: Path, networks: list[Any]) -> str:
    """The networks as `save_pretrained` names their tensors."""
    file = folder / "model.safetensors"
    save_file(
        {
            f"layers.{layer}.{name}": tensor.detach().clone()
            for layer, network in enumerate(networks)
            for name, tensor in network.named_parameters()
        },
        file,
    )
    return str(folder)


@torch.no_grad()
def read_by_hand(model: Any, ids: list[int]) -> list[Tensor]:
    """What the attention of each layer reads of a row `[T, C]`, as transformers gives it out."""
    found = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    layers = model.get_decoder().layers
    return [layer.input_layernorm(states)[0] for layer, states in zip(layers, found)]


@torch.no_grad()
def plan_by_hand(networks: list[Any], read: list[Tensor]) -> Callable[[Prompt, Any], Plans]:
    def plan(prompt: Prompt, method: Any) -> Plans:
        with torch.no_grad():
            scores = networks[prompt.index](read[prompt.index])  # [T, H]
        recent = range(prompt.length - method.budget, prompt.length)
        return [
            [i for i in range(prompt.length) if scores[i, head] >= method.threshold or i in recent]
            for head in range(len(prompt.keys))
        ]

    return plan


def check_tokens(folder: Path, kind: str, fused: bool, policy: Any, **options: Any) -> None:
    """What the networks score below a threshold is hidden."""
    networks = make_networks(kind)
    method = mmaccel.KVzap(BUDGET, threshold=THRESHOLDS[kind], scorer=write(folder, networks))
    every, stats = check_masks(
        method,
        lambda model, ids: plan_by_hand(networks, read_by_hand(model, ids)),
        policy=policy,
        fused=fused,
        **options,
    )
    kept = {len(head) for hides in every for plan in hides.plans.values() for head in plan}
    assert len(kept) > 3, "heads keep different numbers"
    assert "scorer=" in stats.reference


@covering(
    policy=[mmaccel.Autoregressive(), mmaccel.Jacobi(window=5)],
    chunk=[None, 7],
    fused=[True, False],
)
def test_eviction_is_a_mask_over_the_full_cache(
    policy: Any, chunk: int | None, fused: bool, tmp_path: Path
) -> None:
    check_tokens(tmp_path, KINDS[chunk is None], fused, policy, prefill_chunk_size=chunk)


def check_rounds(folder: Path, policy: Any) -> None:
    """What the networks say of generated tokens decides in rounds, as in a mask that grows."""
    networks = make_networks("mlp")
    method = mmaccel.KVzap(BUDGET, every=6, threshold=0.1, scorer=write(folder, networks))
    model, rows = build_lm("qwen2"), draw_rows(23, 4)
    received, stats = generate(model, policy, rows, kv_cache=method, max_new_tokens=34)
    whole, _ = generate(model, policy, rows, max_new_tokens=34)
    assert not (received == whole).all(1).any(), "also what is generated goes"
    for row, ids in enumerate(rows):
        read: list[list[Tensor]] = [[], []]  # of each layer [T, C], pass by pass
        hooks = [
            layer.input_layernorm.register_forward_hook(
                lambda module, given, made, index=index: read[index].append(made[0])  # noqa: B023
            )
            for index, layer in enumerate(model.get_decoder().layers)
        ]

        def plan(prompt: Prompt, method: Any) -> Plans:
            with torch.no_grad():
                scores = networks[prompt.index](torch.cat(read[prompt.index]))  # noqa: B023
            every = [(head, list(range(prompt.length))) for head in range(len(prompt.keys))]
            return [
                [
                    i for i, position in enumerate(positions)
                    if scores[position, head] >= method.threshold
                    or i >= len(positions) - method.budget
                ]
                for head, positions in prompt.held or every
            ]  # fmt: skip

        expected = greedy_rows(model, [ids], lambda ids: Rounds(method, plan, 2, len(ids)), 34)
        for hook in hooks:
            hook.remove()
        assert received[row].tolist() == expected[0]
    assert "every=6" in stats.reference


@pytest.mark.parametrize("policy", [mmaccel.Autoregressive(), mmaccel.Jacobi(window=6)], ids=repr)
def test_rounds_are_a_mask_that_grows(policy: Any, tmp_path: Path) -> None:
    check_rounds(tmp_path, policy)


def test_scores_of_another_entry_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = kvzap_scorer.Scorer.score
    last: dict[int, Tensor] = {}

    def score(self: Any, index: int, hidden: Tensor) -> Tensor:
        """Of a pass of one entry, the scores of the pass before."""
        made = own(self, index, hidden)
        found = last.get(index, made) if hidden.shape[1] == 1 else made
        last[index] = made[..., -1:]
        return found

    monkeypatch.setattr(kvzap_scorer.Scorer, "score", score)
    with pytest.raises(AssertionError):
        check_rounds(tmp_path, mmaccel.Autoregressive())


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_networks(kind: str, tmp_path: Path) -> None:
    """The file itself may be given; published ones are of bfloat16."""
    networks = make_networks(kind)
    for network in networks:
        network.bfloat16()
    write(tmp_path, networks)
    scorer = open_scorer(str(tmp_path / "model.safetensors"))
    hidden = torch.randn(3, 7, 32)
    for layer, network in enumerate(networks):
        with torch.no_grad():
            expected = network(hidden.bfloat16()).float().mT
            assert torch.equal(scorer.score(layer, hidden.bfloat16()), expected)
            expected = network.float()(hidden).mT
        torch.testing.assert_close(scorer.score(layer, hidden), expected)


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, make_networks("linear"))
    before = open_scorer(str(tmp_path))
    assert open_scorer(str(tmp_path)) is before
    write(tmp_path, make_networks("linear", heads=4))
    assert open_scorer(str(tmp_path)).sizes.heads == 4


def _a_layer_before(patch: pytest.MonkeyPatch) -> None:
    own = Scorer.score
    patch.setattr(Scorer, "score", lambda self, index, hidden: own(self, 1 - index, hidden))


def _a_column_before(patch: pytest.MonkeyPatch) -> None:
    own = Scorer.score
    patch.setattr(Scorer, "score", lambda self, index, hidden: own(self, index, hidden.roll(1, 1)))


def _what_the_layer_before_read(patch: pytest.MonkeyPatch) -> None:
    own = Observer.keep
    last: list[Tensor] = []

    def keep(self: Any, layer: int, *given: Any, hidden: Tensor, **others: Any) -> None:
        last.append(hidden)
        own(self, layer, *given, hidden=last[-2] if layer else hidden, **others)

    patch.setattr(Observer, "keep", keep)


def _no_gelu(patch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(linear=nn.functional.linear, gelu=lambda hidden: hidden)
    patch.setattr(kvzap_scorer, "F", own)


def _nothing_is_recent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mmaccel.KVzap, "n_recent", property(lambda self: 1))


BUGS = {
    "layer off by one": _a_layer_before,
    "the entry before": _a_column_before,
    "the hidden states of the layer before": _what_the_layer_before_read,
    "no activation": _no_gelu,
    "recent entries go": _nothing_is_recent,
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_seen(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises(AssertionError):
        check_tokens(tmp_path, "mlp", True, mmaccel.Autoregressive())


def test_a_scorer_of_another_model_is_refused_before_it_runs(tmp_path: Path) -> None:
    method = mmaccel.KVzap(scorer=write(tmp_path, make_networks("linear", layers=3)))
    with pytest.raises(UnsupportedModelError) as caught:
        mmaccel.attach(build_lm("qwen2"), "jacobi", kv_cache=method)
    assert str(LayerSizes(depth=2, heads=2, channels=32)) in str(caught.value)


def test_a_method_with_a_scorer_looks_at_no_queries(tmp_path: Path) -> None:
    path = write(tmp_path, make_networks("linear"))
    method = mmaccel.KVzap(scorer=path)
    assert method.observed == 0 and "hidden states" in method.needs
    assert mmaccel.KVzap().observed == 64 and not mmaccel.KVzap().reads_hidden
