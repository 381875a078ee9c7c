"""The table of nodes and its schema: every policy, every field, the library's own bounds."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, fields
from typing import Any

import pytest

from mmaccel.catalog import METHODS, POLICIES, load, make, make_policy
from mmaccel.comfy import widgets
from mmaccel.comfy.fields import field_tooltips
from mmaccel.comfy.methods import policy_inputs
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.schemas import make_exports, node_class
from mmaccel.comfy.table import NodeSpec, Socket, Widget
from mmaccel.comfy.values import refusal, to_argument, to_arguments
from mmaccel.errors import OptionError
from mmaccel.options import LoadOptions, SamplingOptions, Switch, option

_POLICY_NODES = {n: next(s for s in NODES.values() if s.title.endswith(f": {n}")) for n in POLICIES}
_FIELDS = [(n, w) for n in POLICIES for w in policy_inputs(n) if isinstance(w, Widget)]
_NUMBERS = [(n, w) for n, w in _FIELDS if w.kind in ("int", "float")]
_TEXTS = [(n, w) for n, w in _FIELDS if w.kind == "choice"]


_DRAWS = "temperature top_k top_p min_p"
_IMAGES = f"prompt negative_prompt seed num_images batch_size guidance_scale {_DRAWS}"
_SAVED = {  # node -> its widgets in graphs that were saved before others were added, by place
    "TextToImage": "model prompt seed policy negative_prompt num_images guidance_scale width "
    "height",
    "LoadModel": "model device dtype width height decoder family cuda_graphs fused",
    "GenerateImage": _IMAGES,
    "Compare": _IMAGES,
    "LoadSpeechModel": "model codec device dtype family cuda_graphs fused",
    "GenerateSpeech": f"text voice seed max_seconds batch_size {_DRAWS} repetition_penalty",
    "LoadVideoModel": "model codec device dtype cuda_graphs fused",
    "GenerateVideo": f"seed {_DRAWS}",
    "LoadVisionModel": "model device dtype cuda_graphs fused",
    "VisualTokens": "method keep n_keep",
    "AnswerQuestion": f"question seed max_tokens batch_size {_DRAWS}",
}


def named(pair: Any) -> str:
    return f"{pair[0]}.{pair[1].name}"


_LAYERS = {"kv_cache": "KVCache", "attention": "Attention"}  # slot -> how ids of its nodes end


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_policys_node_has_its_open_fields_in_order_and_its_own_defaults(name: str) -> None:
    cls = load(POLICIES[name].target)
    spec = _POLICY_NODES[name]
    wanted = [f.name for f in fields(cls) if f.name not in POLICIES[name].preset]
    assert [e.name for e in spec.inputs if e.name != "coarse_folder"] == wanted
    made = spec.run(None, **to_arguments(spec, {}), **{s.name: None for s in spec.sockets})
    assert made.values[0].policy == make_policy(name) and made.values[0].name == name


@pytest.mark.parametrize(
    ("slot", "name"), [(slot, name) for slot in _LAYERS for name in METHODS[slot]]
)
def test_a_node_for_layers_has_its_methods_fields_and_defaults(slot: str, name: str) -> None:
    entry = METHODS[slot][name]
    spec = next(
        each
        for each in NODES.values()
        if each.outputs[0].name == slot and each.title.endswith(f": {name}")
    )
    assert spec.id.endswith(_LAYERS[slot])
    known = [f.name for f in fields(load(entry.target)) if f.init]
    assert [e.name for e in spec.inputs] == known
    made = spec.run(None, **to_arguments(spec, {}))
    assert made.values == (make(slot, name),) and made.values[0].slot == spec.outputs[0].name


@pytest.mark.parametrize("spec", NODES.values(), ids=lambda spec: spec.id)
def test_everything_is_explained_and_every_default_is_possible(spec: NodeSpec) -> None:
    for entry in (*spec.inputs, *spec.outputs):
        assert len(entry.tooltip) > 12 and entry.tooltip.endswith("."), entry.name
        assert not re.search(r"`|mmaccel\.\w+\.|^As in|None|stands for", entry.tooltip)
    assert refusal(spec, spec.defaults()) is None
    for widget in spec.widgets:
        if widget.kind in ("int", "float"):
            assert widget.least <= widget.default <= widget.most and widget.step > 0
        assert not widget.choices or widget.default in widget.choices


@pytest.mark.parametrize("pair", _NUMBERS, ids=named)
def test_what_is_outside_the_bounds_is_refused_in_the_librarys_words(pair: Any) -> None:
    """Bounds are tight: just outside them the policy itself refuses; inside, it does not."""
    name, widget = pair
    spec, step = _POLICY_NODES[name], 1 if widget.kind == "int" else 1e-9
    below = widget.least - step
    said = refusal(spec, {widget.name: below})
    with pytest.raises(OptionError) as refused:
        make_policy(name, **{widget.name: below})
    assert said == str(refused.value)
    for edge in (widget.least, widget.most):
        assert refusal(spec, {widget.name: edge}) is None
    assert f"{widget.name}: expected" in str(refusal(spec, {widget.name: widget.most + 1}))
    try:
        make_policy(name, **{widget.name: widget.most + step})
    except OptionError:
        return
    assert widget.most in (2**20, 1e6)  # the library knows no bound


@pytest.mark.parametrize("pair", _TEXTS, ids=named)
def test_choices_are_what_the_policy_says_it_takes(pair: Any) -> None:
    name, widget = pair
    real = [c for c in widget.choices if to_argument(widget, c) == c]
    for choice in widget.choices:
        assert refusal(_POLICY_NODES[name], {widget.name: choice}) is None
    said = refusal(_POLICY_NODES[name], {widget.name: "nonsense"})
    with pytest.raises(OptionError) as refused:
        make_policy(name, **{widget.name: "nonsense"})
    assert said == str(refused.value)
    listed = re.search(r"expected one of (.+), received", said)
    if (
        listed
        and said.startswith(f"{widget.name}:")
        and (name, widget.name)
        != (
            "lossless-unmask",
            "order",  # lists the orders there are, and refuses one of them later
        )
    ):
        assert set(listed[1].split(", ")) == set(real)


def test_an_order_that_depends_on_draws_is_not_offered_where_it_is_refused() -> None:
    def order(name: str) -> tuple[str, ...]:
        return next(w.choices for n, w in _TEXTS if n == name and w.name == "order")

    assert "sampled" in order("stepwise") and "sampled" not in order("lossless-unmask")
    assert set(order("stepwise")) == {*order("lossless-unmask"), "sampled"}


def test_values_that_stand_for_others() -> None:
    def policy(name: str, **values: Any) -> Any:
        spec = _POLICY_NODES[name]
        return spec.run(None, **to_arguments(spec, values)).values[0].policy

    assert policy("jacobi", window=0) == make_policy("jacobi", window="adaptive")
    assert policy("lossless-unmask", drafts=0) == make_policy("lossless-unmask", drafts="auto")
    assert policy("stepwise", block=0).block is None and policy("stepwise", block=4).block == 4
    assert policy("masked-parallel", steps=0).steps is None
    assert policy("entropy-bounded", gamma=0.0) == make_policy("entropy-bounded", gamma=0.0)
    assert policy("entropy-bounded", budget_nats=2.0) == make_policy(
        "entropy-bounded", budget_nats=2.0
    )
    assert policy("lossless-unmask", layout="auto").layout is None
    assert policy("adaptive-block", delimiters="198, 13 7").delimiters == (198, 13, 7)
    assert policy("confident-parallel", drop_suffix=False).drop_suffix is False  # 0 for None?


def test_tooltips_come_from_the_nearest_class_that_documents_a_field() -> None:
    class Parent:
        """Parent.

        Attributes:
            a: parent a.
            b: parent b,
                in two lines.
        """

    class Child(Parent):
        """Child.

        Args:
            a: as in `Parent`.
            b, c: child, one of `mmaccel.x.NAMES`.

        Raises:
            d: not a field.
        """

    assert field_tooltips(Child) == {"a": "Parent a.", "b": "Child.", "c": "Child."}
    assert field_tooltips(Parent)["b"] == "Parent b, in two lines."


@pytest.mark.usefixtures("comfy")
@pytest.mark.parametrize("name", _SAVED)
def test_widgets_stay_where_saved_workflows_have_them(name: str) -> None:
    """The page saves their values by place; a graph of the API leaves out what it does not know."""
    spec = NODES[f"MMAccel{name}"]
    saved = _SAVED[name].split()
    entries = node_class(spec).GET_SCHEMA().inputs
    widgets = {widget.name: widget for widget in spec.widgets}
    entries.sort(key=lambda entry: bool(entry.options.get("optional")))  # as the page shows them
    shown = [entry.id for entry in entries if entry.id in widgets]
    assert shown[: len(saved)] == saved
    assert all(widgets[added].is_optional for added in shown[len(saved) :])


def test_a_new_field_becomes_a_widget_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class More(LoadOptions):
        quick: Switch = option("auto", "whether it is quick")
        is_odd: bool = option(False, "whether it is odd")
        nickname: str | None = option(None, "what it is called")
        least: int = option(2, "how many")
        hidden: int = 3

    @dataclass(frozen=True, kw_only=True)
    class Warmer(SamplingOptions):
        warmth: float | None = option(None, "how warm")

    monkeypatch.setattr(widgets, "LoadOptions", More)
    monkeypatch.setattr(widgets, "SamplingOptions", Warmer)
    made = widgets.load_widgets("model")
    assert list(made)[-4:] == ["quick", "is_odd", "nickname", "least"]
    values = [
        ("quick", "on", True),
        ("is_odd", True, True),
        ("nickname", "", None),
        ("least", 3, 3),
    ]
    for name, shown, meant in values:
        assert made[name].is_optional and to_argument(made[name], shown) == meant
    warmth = widgets.sampling_widgets()[-1]
    assert warmth.is_optional and to_argument(warmth, -1.0) is None
    assert warmth.tooltip == "How warm. -1 takes what the model's authors recommend."


@pytest.mark.usefixtures("comfy")
@pytest.mark.parametrize("spec", NODES.values(), ids=lambda spec: spec.id)
def test_the_schema_says_what_the_table_says(spec: NodeSpec) -> None:
    cls = node_class(spec)
    schema = cls.GET_SCHEMA()
    assert (schema.node_id, schema.display_name) == (spec.id, spec.title)
    assert schema.hidden == (["PROMPT", "UNIQUE_ID"] if spec.has_old_names else [])
    assert (schema.is_output_node, schema.enable_expand) == (spec.is_output, spec.is_graph)
    assert schema.category == spec.category and "mmaccel" in spec.category
    assert [entry.id for entry in schema.inputs] == [entry.name for entry in spec.inputs]
    for entry, own in zip(schema.inputs, spec.inputs, strict=True):
        options = entry.options
        assert options["tooltip"] == own.tooltip
        assert options.get("optional", False) is own.is_optional
        if isinstance(own, Socket):
            assert entry.io_type == own.kind and "default" not in options
            continue
        is_choice = entry.io_type == "COMBO"
        assert is_choice == bool(own.choices) and (
            not is_choice or options["options"] == list(own.choices)
        )
        assert options["default"] == own.default
        assert bool(options.get("extra_dict")) is own.is_advanced
        if own.kind in ("int", "float"):
            assert (options["min"], options["max"], options["step"]) == (
                own.least,
                own.most,
                own.step,
            )
            assert options.get("round") is (False if own.kind == "float" else None)
    flat = {entry.id: entry.options for entry in schema.inputs}
    if "seed" in flat and spec.outputs[0].name not in _LAYERS:  # a method's seed is not the run's
        assert flat["seed"]["control_after_generate"] is True
        assert flat["seed"]["max"] == 2**64 - 1
        assert flat["policy"]["optional"] or spec.is_graph
    assert [(entry.options["display_name"], entry.io_type) for entry in schema.outputs] == [
        (output.name, output.kind) for output in spec.outputs
    ]
    ids = [entry.id for entry in (*schema.inputs, *schema.outputs)]
    assert len(ids) == len(set(ids))  # ComfyUI 0.3.64 wants this between both, later ones not
    assert cls.validate_inputs(**spec.defaults()) is True
    assert "fingerprint_inputs" in vars(cls)


@pytest.mark.usefixtures("comfy")
def test_the_extension_lists_every_node() -> None:
    extension = make_exports(NODES.values())["comfy_entrypoint"]()
    classes = asyncio.run(extension.get_node_list())
    assert [cls.GET_SCHEMA().node_id for cls in classes] == list(NODES)


def test_values_that_only_something_else_can_tell_are_not_refused() -> None:
    for node, values in (
        ("JacobiPolicy", {"window": None}),  # a link fills it later
        ("LoadModel", {"model": " scenes "}),
        ("LoadModel", {"dtype": "bf16"}),
        ("LoadModel", {"device": "cpu", "dtype": "torch.float16"}),
        ("GenerateImage", {"seed": 2**64 - 1}),
        ("TextToImage", {"policy": "sjd"}),
    ):
        assert refusal(NODES[f"MMAccel{node}"], values) is None


def test_sockets_are_never_widgets() -> None:
    (draft,) = [e for e in _POLICY_NODES["speculative"].inputs if isinstance(e, Socket)]
    assert (draft.name, draft.kind, draft.is_optional) == ("draft_model", "MMACCEL_MODEL", True)
    assert not _POLICY_NODES["prompt-lookup"].sockets
