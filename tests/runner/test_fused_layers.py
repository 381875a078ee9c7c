"""The table of decoder layers: every row is a class of transformers, and is the class's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from typing import Any

import pytest
from torch import nn

from mmaccel import CausalLMWindow
from mmaccel.pipelines.hosts.runner.fused_layers import HEADS, LAYERS, NormSpec, Residuals
from mmaccel.pipelines.hosts.runner.fused_structure import name_forward
from mmaccel.pipelines.hosts.transformers_release import VERSION, read_release
from tests.fixtures.fused_lms import RECOGNISED, are_apart, build_decoder
from tests.fixtures.windows import build_model

OF_IMAGES = ("chameleon", "chameleon, norms after", "glm_image")  # in `test_fused_decoder` too

OF_BOOKS = {  # in `tests/depth`
    "csm.CsmDecoderLayer",
    "qwen3_omni_moe.Qwen3OmniMoeTalkerCodePredictorDecoderLayer",
}


def is_installed(name: str) -> bool:
    since = LAYERS[name].since
    return not since or read_release(since) <= read_release(VERSION)


def find_layers(model: Any) -> nn.ModuleList:
    lists = [part for part in model.get_decoder().children() if isinstance(part, nn.ModuleList)]
    return lists[0]


def choose_route(model: Any) -> tuple[str, str]:
    window = CausalLMWindow(model, fused="auto")
    window.choose_route()
    return window.route.name, window.route.reason


@pytest.mark.parametrize("name", [*LAYERS, *HEADS])
def test_a_row_is_a_class_with_a_forward_of_its_own(name: str) -> None:
    if name in LAYERS and not is_installed(name):
        pytest.skip(f"transformers {LAYERS[name].since} brings it")
    family, _, kind = name.partition(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    assert "forward" in vars(getattr(module, kind))


def test_every_row_is_tried() -> None:
    """By a model whose logits `test_fused_decoder` compares with its own."""
    models = [*map(build_decoder, RECOGNISED), *map(build_model, OF_IMAGES)]
    tried = {name_forward(find_layers(model)[0]) for model in models}
    tried |= OF_BOOKS
    assert tried == set(filter(is_installed, LAYERS))
    assert set(HEADS) <= {name_forward(model) for model in models}


def change_forward(module: nn.Module) -> None:
    """Make a module one of a child class, whose forward passes for the one that it wraps."""
    kind = type(module)

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return kind.forward(self, *args, **options)

    module.__class__ = type("Changed", (kind,), {"forward": forward})


def inherit_forward(module: nn.Module) -> None:
    module.__class__ = type("Inherited", (type(module),), {"extra": 1})


PARTS: dict[str, Callable[[Any], nn.Module]] = {
    "layer": lambda model: model.model.layers[1],
    "attention": lambda model: model.model.layers[1].self_attn,
    "mlp": lambda model: model.model.layers[1].mlp,
    "projection": lambda model: model.model.layers[1].mlp.up_proj,
    "activation": lambda model: model.model.layers[1].mlp.act_fn,
    "norm": lambda model: model.model.layers[1].input_layernorm,
    "last norm": lambda model: model.model.norm,
    "decoder": lambda model: model.model,
    "model": lambda model: model,
}


@pytest.mark.parametrize("part", PARTS)
def test_a_child_with_another_forward_is_refused(part: str) -> None:
    model = build_decoder("llama")
    change_forward(PARTS[part](model))
    route, reason = choose_route(model)
    assert route == "model" and "Changed" in reason
    if part == "layer":
        assert reason == "a Changed, which the fused decoder does not know"


@pytest.mark.parametrize("part", ["layer", "attention", "norm", "model"])
def test_a_child_that_inherits_its_forward_is_served(part: str) -> None:
    model = build_decoder("llama")
    inherit_forward(PARTS[part](model))
    assert choose_route(model) == ("fused", "")


def test_layers_of_two_classes_are_refused() -> None:
    model = build_decoder("llama")
    model.model.layers[1] = build_decoder("qwen3").model.layers[1]
    assert choose_route(model) == ("model", "layers of several classes in layers")


WRONG: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"norm": NormSpec("layer")}),
    ("llama", {"interleaved": True}),
    ("llama", {"residuals": Residuals("post_attention_layernorm", pre_mlp="input_layernorm")}),
    ("llama", {"residuals": Residuals(is_parallel=True)}),
    ("helium", {"repeats": False}),
    ("biogpt", {"first_position": 0}),
    ("granite", {"embed_scale": ""}),
    ("gemma3", {"residuals": Residuals(pre_mlp="pre_feedforward_layernorm")}),
)
WRONG_ATTENTION: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"qkv": ("k_proj", "q_proj", "v_proj")}),
    ("qwen3", {"norm": None}),
    ("cohere2", {"turns_where_sliding": False}),
    ("smollm3", {"turns_if": ""}),
    ("gpt_neox", {"is_grouped": False}),
    ("gemma2, capped", {"softcap": ""}),
)
WRONG_MLP: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"up": ("up_proj", "gate_proj")}),
    ("glm", {"is_gated": False}),
)


def spoil(monkeypatch: pytest.MonkeyPatch, model: Any, part: str, changes: dict[str, Any]) -> None:
    """Change the row of a model's layers."""
    name = name_forward(find_layers(model)[0])
    spec = LAYERS[name]
    spec = replace(spec, **({part: replace(getattr(spec, part), **changes)} if part else changes))
    monkeypatch.setitem(LAYERS, name, spec)


ROWS = [
    pytest.param(name, part, changes, id=f"{name}-{'-'.join(changes)}")
    for part, rows in (("", WRONG), ("attention", WRONG_ATTENTION), ("mlp", WRONG_MLP))
    for name, changes in rows
]


@pytest.mark.parametrize(("name", "part", "changes"), ROWS)
def test_a_wrong_row_is_found_by_the_self_check(
    name: str, part: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_decoder(name)
    spoil(monkeypatch, model, part, changes)
    route, reason = choose_route(model)
    assert route == "model"
    assert "off in the" in reason or "end the fused decoder" in reason
    assert are_apart(model.parameters())


def test_a_row_that_names_no_part_keeps_the_models_own_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build_decoder("llama")
    spoil(monkeypatch, model, "mlp", {"down": "down"})
    route, reason = choose_route(model)
    assert route == "model" and "AttributeError" in reason


@pytest.mark.parametrize("name", ["cohere", "gemma2, capped"])
def test_a_head_that_is_not_in_the_table_is_found_by_the_self_check(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_decoder(name)
    monkeypatch.delitem(HEADS, name_forward(model))
    route, reason = choose_route(model)
    assert route == "model" and "off in the" in reason


def test_the_option_of_a_row_is_the_configurations() -> None:
    """A name that no configuration has would be an error at the first run."""
    for name in RECOGNISED:
        model = build_decoder(name)
        config = model.get_decoder().config
        spec = LAYERS[name_forward(find_layers(model)[0])]
        options = [spec.embed_scale, spec.attention.unless, spec.attention.unless_eager]
        options += [getattr(spec.residuals, f.name) for f in fields(spec.residuals)][5:]
        assert all(hasattr(config, option) for option in options if option), name
