"""The table of nodes and its two schemas: every policy, every field, the library's own bounds."""

from __future__ import annotations

import asyncio
import re
from dataclasses import fields
from typing import Any

import pytest
import torch

from mmaccel.catalog import METHODS, POLICIES, load, make_policy
from mmaccel.comfy.fields import field_tooltips
from mmaccel.comfy.methods import policy_inputs
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.schemas import v1_class, v3_exports
from mmaccel.comfy.table import NodeSpec, Socket, Widget
from mmaccel.comfy.values import check_widget, refusal, to_argument, to_arguments
from mmaccel.errors import OptionError
from tests.comfy.fake_comfy import install

_POLICY_NODES = {n: next(s for s in NODES.values() if s.title.endswith(f": {n}")) for n in POLICIES}
_FIELDS = [(n, w) for n in POLICIES for w in policy_inputs(n) if isinstance(w, Widget)]
_NUMBERS = [(n, w) for n, w in _FIELDS if w.kind in ("int", "float")]
_TEXTS = [(n, w) for n, w in _FIELDS if w.kind == "choice"]


def named(pair: Any) -> str:
    return f"{pair[0]}.{pair[1].name}"


def test_there_is_a_node_for_every_policy_and_twelve_more() -> None:
    others = {"MMAccelLoadModel", "MMAccelGenerateImage", "MMAccelCompare", "MMAccelStats"}
    others |= {"MMAccelTextToImage"}
    others |= {"MMAccelLoadSpeechModel", "MMAccelGenerateSpeech"}
    others |= {"MMAccelLoadVideoModel", "MMAccelGenerateVideo"}
    others |= {"MMAccelLoadVisionModel", "MMAccelVisualTokens", "MMAccelAnswerQuestion"}
    others |= {name for name in NODES if name.endswith("VisualTokens")}
    assert set(NODES) == others | {spec.id for spec in _POLICY_NODES.values()}
    assert len(NODES) == len(POLICIES) + 12 + len(METHODS["visual_tokens"])
    assert _POLICY_NODES["mc-sjd"].id == "MMAccelMcSjdPolicy"
    assert all(re.fullmatch(r"MMAccel[A-Za-z0-9]+", name) for name in NODES)


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_policys_node_has_its_open_fields_in_order_and_its_own_defaults(name: str) -> None:
    cls = load(POLICIES[name].target)
    spec = _POLICY_NODES[name]
    wanted = [f.name for f in fields(cls) if f.name not in POLICIES[name].preset]
    assert [e.name for e in spec.inputs if e.name != "coarse_folder"] == wanted
    made = spec.run(None, **to_arguments(spec, {}), **{s.name: None for s in spec.sockets})
    assert made.values[0].policy == make_policy(name) and made.values[0].name == name


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


def test_a_widget_refuses_what_is_no_number_in_its_bounds() -> None:
    widget = Widget("x", "float", 1.0, "A number.", 0.0, 2.0, 0.5)
    for value in (0, 0.0, 2.0):
        check_widget(widget, value)
    for value in (float("nan"), -1e-9, 2.1, float("inf"), True, "1", None):
        with pytest.raises(OptionError, match=r"x: expected a number in 0..2, received"):
            check_widget(widget, value)


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
    if listed and said.startswith(f"{widget.name}:") and (name, widget.name) != (
        "lossless-unmask", "order",  # lists the orders there are, and refuses one of them later
    ):  # fmt: skip
        assert set(listed[1].split(", ")) == set(real)


def test_a_tooltip_names_what_the_page_shows() -> None:
    def said(name: str, field: str) -> str:
        return next(e.tooltip for e in _POLICY_NODES[name].inputs if e.name == field)

    assert said("jacobi", "window") == "Tokens processed per pass, or 0 to choose by measured cost."
    assert said("stepwise", "block").startswith("Slots per block; 0 takes the canvas as one")
    assert said("lossless-unmask", "layout").endswith(
        "auto takes entries where a cache is kept and rows otherwise."
    )
    assert said("entropy-bounded", "gamma").startswith("Nats a pass. -1, where no budget is given")
    assert "; or 0 to choose 1, 2, 4 or 8 by measured cost." in said("lossless-unmask", "drafts")
    assert said("gsd", "window") == "Tokens processed per pass."


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


@pytest.mark.parametrize(
    ("node", "values", "said"),
    [
        ("EntropyBoundedPolicy", dict(gamma=0.1, budget_nats=1.0), "gamma, budget_nats: expected"),
        ("AdaptiveBlockPolicy", dict(delimiters="x"), "delimiters: expected token ids such as"),
        ("JacobiPolicy", dict(window=4097), "window: expected an integer in 1..4096"),
        ("JacobiPolicy", dict(window=None), None),  # a link fills it later
        ("LoadModel", dict(width=64), "expected both or neither, received 64 and 0"),
        ("LoadModel", dict(model="no-such-model"), "received 'no-such-model'"),
        ("LoadModel", dict(model="owner/name"), None),  # only the hub can say
        ("LoadModel", dict(dtype="int8"), "dtype: expected auto, float32, bfloat16"),
        ("LoadModel", dict(dtype="bf16"), None),
        ("LoadModel", dict(device="cpu", dtype="torch.float16"), None),
        ("LoadModel", dict(device="tpu"), "device: expected a device of this machine, received"),
        ("LoadModel", dict(decoder="/no/file"), "decoder: expected a file, received '/no/file'"),
        (
            "LoadModel",
            dict(device="cpu", cuda_graphs="on"),
            "expected a model on a CUDA device, received one on cpu",
        ),
        ("LoadModel", dict(device="auto", cuda_graphs="on"), None),  # only ComfyUI knows where
        ("GenerateImage", dict(temperature=-0.5), "temperature"),
        ("GenerateImage", dict(top_p=0.0), "top_p"),
        ("GenerateImage", dict(num_images=5000), "num_images: expected a number in 0..4096"),
        ("GenerateImage", dict(seed=2**64 - 1), None),
        (
            "GenerateImage",
            dict(seed=2**64),
            "in 0..18446744073709551615, received 18446744073709551616",
        ),
    ],
)
def test_bad_values_are_refused_before_anything_runs(
    node: str, values: dict[str, Any], said: str | None
) -> None:
    spec = NODES[f"MMAccel{node}"]
    refused = refusal(spec, values)
    assert refused is None if said is None else said in str(refused)
    cls: Any = v1_class(spec)
    assert cls.VALIDATE_INPUTS(**values) == (refused or True)


def test_a_device_of_another_machine_is_refused() -> None:
    if not torch.cuda.is_available():
        said = refusal(NODES["MMAccelLoadModel"], {"device": "cuda"})
        assert "expected a device of this machine" in str(said)


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


def test_widgets_stay_where_saved_workflows_have_them() -> None:
    """The page saves their values by place, those of required inputs first."""
    for name in ("MMAccelGenerateImage", "MMAccelCompare"):
        given = v1_class(NODES[name]).INPUT_TYPES()  # type: ignore[attr-defined]
        shown = [*given["required"], *given["optional"]]
        assert [each for each in shown if each not in ("model", "policy")] == [
            "prompt", "negative_prompt", "seed", "num_images", "batch_size", "guidance_scale",
            "temperature", "top_k", "top_p", "min_p",
        ]  # fmt: skip


@pytest.mark.parametrize("spec", NODES.values(), ids=lambda spec: spec.id)
def test_first_schema(spec: NodeSpec) -> None:
    cls: Any = v1_class(spec)
    given = cls.INPUT_TYPES()
    shown = {**given["required"], **given.get("optional", {})}
    assert list(shown) == [
        *(e.name for e in spec.inputs if e.name in given["required"]),
        *given.get("optional", {}),
    ]
    assert set(shown) == {entry.name for entry in spec.inputs}
    assert callable(getattr(cls, cls.FUNCTION)) and cls.CATEGORY.startswith("mmaccel")
    assert len(cls.RETURN_TYPES) == len(cls.RETURN_NAMES) == len(cls.OUTPUT_TOOLTIPS)
    assert cls.OUTPUT_NODE is (spec.id == "MMAccelStats")
    for kind, options in shown.values():
        assert isinstance(kind, list) or kind.isupper()
        assert options["tooltip"] and (
            isinstance(kind, list) or "default" in options or "_" in kind or kind == "IMAGE"
        )
    if "seed" in shown:
        assert shown["seed"][1]["control_after_generate"] is True
        assert shown["seed"][1]["max"] == 2**64 - 1
        assert "policy" in given["optional"] or spec.is_graph


def test_the_third_schema_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, with_v3=True)
    extension = v3_exports(NODES.values())["comfy_entrypoint"]()
    classes = asyncio.run(extension.get_node_list())
    assert isinstance(classes, list) and len(classes) == len(NODES)
    for cls, spec in zip(classes, NODES.values()):
        schema, first = cls.GET_SCHEMA(), v1_class(spec).INPUT_TYPES()
        assert (schema.node_id, schema.display_name) == (spec.id, spec.title)
        assert schema.is_output_node is spec.is_output and schema.category == spec.category
        assert schema.enable_expand is spec.is_graph
        assert schema.hidden == list(first.pop("hidden", {}).values())
        flat = {**first["required"], **first.get("optional", {})}
        assert [entry.id for entry in schema.inputs] == [entry.name for entry in spec.inputs]
        for entry in schema.inputs:
            kind, options = flat[entry.id]
            assert entry.io_type == ("COMBO" if isinstance(kind, list) else kind)
            if isinstance(kind, list):
                assert entry.options["options"] == kind
            is_optional = entry.id in first.get("optional", {})
            assert entry.options.get("optional", False) is is_optional
            extra = entry.options.get("extra_dict") or {}
            assert extra.get("advanced") == options.get("advanced")
            for name in ("default", "min", "max", "step", "round", "tooltip"):
                assert entry.options.get(name) == options.get(name), (spec.id, entry.id, name)
            seed = entry.options.get("control_after_generate")
            assert seed == options.get("control_after_generate")
        ids = [entry.id for entry in (*schema.inputs, *schema.outputs)]
        assert len(ids) == len(set(ids))  # ComfyUI 0.3.64 wants this between both, later ones not
        names = [entry.options["display_name"] for entry in schema.outputs]
        assert names == [output.name for output in spec.outputs]
        kinds = [entry.io_type for entry in schema.outputs]
        assert tuple(kinds) == v1_class(spec).RETURN_TYPES
        assert cls.validate_inputs(**spec.defaults()) is True
        assert ("fingerprint_inputs" in vars(cls)) is (spec.fingerprint is not None)


def test_sockets_are_never_widgets() -> None:
    (draft,) = [e for e in _POLICY_NODES["speculative"].inputs if isinstance(e, Socket)]
    assert (draft.name, draft.kind, draft.is_optional) == ("draft_model", "MMACCEL_MODEL", True)
    assert not _POLICY_NODES["prompt-lookup"].sockets
