"""The table of nodes and its schema: every method, every field, the library's own bounds."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from mmaccel.catalog import METHODS, POLICIES, make, make_policy
from mmaccel.cli import _command
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.ports import Node, field_tooltips
from mmaccel.comfy.schemas import find_exports
from tests.architecture.source import ROOT
from tests.comfy.fake_comfy import policy

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
_COMMANDS = {  # node -> the command that does the same
    **dict.fromkeys(("TextToImage", "LoadModel", "GenerateImage", "Compare"), "generate"),
    **dict.fromkeys(("LoadSpeechModel", "GenerateSpeech"), "speak"),
    **dict.fromkeys(("LoadTextToVideoModel", "TextToVideo"), "animate"),
    **dict.fromkeys(("LoadVideoModel", "GenerateVideo"), "animate"),
    **dict.fromkeys(("LoadVisionModel", "VisualTokens", "AnswerQuestion"), "answer"),
}
_OTHERS = {"prompt", "text", "question", "method"}  # what follows a command; --visual-tokens NAME


def node_of(name: str) -> Node:
    return next(node for node in NODES.values() if node.title == f"MMAccel Policy: {name}")


def test_methods_have_their_own_defaults() -> None:
    """Whatever a widget shows for None."""
    made = {node.title.partition(": ")[2]: node for node in NODES.values() if ": " in node.title}
    for name in POLICIES:
        (chosen,) = made[name].run(**made[name].read({}))
        assert (chosen.name, chosen.policy) == (name, make_policy(name))
    for slot in ("kv_cache", "attention"):
        for name in METHODS[slot]:
            assert made[name].run(**made[name].read({})) == (make(slot, name),)
    for name in METHODS["visual_tokens"]:
        (reducers,) = made[name].run(**made[name].read({}))
        assert reducers == (make("visual_tokens", name, keep=0.22),)


def test_values_that_stand_for_others() -> None:
    def made(name: str, **values: Any) -> Any:
        return policy(name, **values).policy

    assert made("Jacobi", window=0) == make_policy("jacobi", window="adaptive")
    assert made("LosslessUnmask", drafts=0) == make_policy("lossless-unmask", drafts="auto")
    assert made("Stepwise", block=0).block is None and made("Stepwise", block=4).block == 4
    assert made("EntropyBounded", gamma=0.0) == make_policy("entropy-bounded", gamma=0.0)
    assert made("LosslessUnmask", layout="auto").layout is None
    assert made("AdaptiveBlock", delimiters="198, 13 7").delimiters == (198, 13, 7)
    assert made("ConfidentParallel", drop_suffix=False).drop_suffix is False  # 0 for None?


@pytest.mark.parametrize("node", NODES.values(), ids=lambda node: node.id)
def test_everything_is_explained_and_every_choice_and_edge_is_possible(node: Node) -> None:
    for port in (*node.inputs, *node.outputs):
        assert len(port.tooltip) > 12 and port.tooltip.endswith("."), port.name
        assert not re.search(r"`|mmaccel\.\w+\.|^As in|None|stands for", port.tooltip)
    assert node.refusal({}) is None
    for port in node.widgets if node.title.startswith("MMAccel Policy") else ():
        options = port.options
        for value in (*options.get("options", ()), options.get("min"), options.get("max")):
            assert node.refusal({port.name: value}) is None
        if "min" in options:
            for beyond in (options["min"] - 1, options["max"] + 1, float("nan"), True, "1"):
                assert f"{port.name}: expected a" in str(node.refusal({port.name: beyond}))
        elif "options" in options:
            said = f"{port.name}: expected one of {', '.join(options['options'])}, received"
            assert said in str(node.refusal({port.name: "nonsense"}))


def test_a_choice_that_a_policy_refuses_is_not_offered() -> None:
    def orders(name: str) -> set[str]:
        (port,) = (each for each in node_of(name).inputs if each.name == "order")
        return set(port.options["options"])

    assert orders("stepwise") == {*orders("lossless-unmask"), "sampled"}


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
        """

    assert field_tooltips(Child) == {"a": "Parent a.", "b": "Child.", "c": "Child."}
    assert field_tooltips(Parent)["b"] == "Parent b, in two lines."


def test_widgets_stay_where_saved_workflows_have_them() -> None:
    """The page saves their values by place; a graph of the API leaves out what it does not know."""
    for name, saved in _SAVED.items():
        widgets = NODES[f"MMAccel{name}"].widgets
        shown = sorted(widgets, key=lambda port: port.is_optional)  # as the page does
        places = saved.split()
        assert [port.name for port in shown][: len(places)] == places
        assert all(port.is_optional for port in shown[len(places) :])


def test_comfyui_gets_what_the_table_says() -> None:
    extension = find_exports()["comfy_entrypoint"]()
    classes = asyncio.run(extension.get_node_list())
    for cls, node in zip(classes, NODES.values(), strict=True):
        schema = cls.define_schema()
        assert (schema.node_id, schema.display_name) == (node.id, node.title)
        assert (schema.is_output_node, schema.enable_expand) == (node.is_output, node.is_graph)
        for made, port in zip(schema.inputs, node.inputs, strict=True):
            shown = {"tooltip": port.tooltip, "optional": port.is_optional, **port.options}
            assert (made.id, made.io_type, made.options) == (port.name, port.kind, shown)
        outputs = [(made.options["display_name"], made.io_type) for made in schema.outputs]
        assert outputs == [(port.name, port.kind) for port in node.outputs]
        ids = [made.id for made in (*schema.inputs, *schema.outputs)]
        assert len(ids) == len(set(ids))  # ComfyUI 0.3.64 wants this between both
        assert cls.validate_inputs() is True


def test_values_that_only_something_else_can_tell_are_not_refused() -> None:
    for name, values in (
        ("JacobiPolicy", {"window": None}),  # a link fills it later
        ("LoadModel", {"model": " scenes "}),
        ("LoadModel", {"model": "owner/name", "cuda_graphs": "on"}),
        ("LoadModel", {"device": "cuda:1", "dtype": "bf16"}),
        ("GenerateImage", {"seed": 2**64 - 1}),
        ("TextToImage", {"policy": "sjd"}),
    ):
        assert NODES[f"MMAccel{name}"].refusal(values) is None


def test_widgets_have_the_names_of_options_and_the_page_has_both() -> None:
    page = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    table = page.split("| widget | command line | Python |\n| --- | --- | --- |\n")[1]
    rows = [line.split(" | ") for line in table.split("\n\n")[0].splitlines()]
    named = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows)))
    written = set(re.findall(r"(--?[a-z][a-z-]*)", " ".join(row[1] for row in rows)))
    known: set[str] = set()
    for name, command in _COMMANDS.items():
        params = _command().commands[command].params
        first = {each.opts[0] for each in params}
        known |= {option for each in params for option in (*each.opts, *each.secondary_opts)}
        for port in NODES[f"MMAccel{name}"].widgets:
            assert port.name in named
            is_own = port.name in _OTHERS or (command, port.name) == ("answer", "batch_size")
            assert is_own or f"--{port.name.replace('_', '-')}" in first, (name, port.name)
    assert written <= known
