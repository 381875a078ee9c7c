"""The node of a first graph: a model, a prompt, a seed and a policy's name go in, images come out.

It runs the nodes that do the same in a larger graph. ComfyUI keeps what these return, the loaded
model above all, and shows their progress, previews and errors at this node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmaccel.catalog import POLICIES, find_policy
from mmaccel.comfy.images import GENERATE
from mmaccel.comfy.loading import LOADERS
from mmaccel.comfy.methods import policy_id
from mmaccel.comfy.table import PREFIX, Host, NodeResult, NodeSpec, Widget
from mmaccel.comfy.values import to_arguments
from mmaccel.comfy.widgets import AUTO

LOAD = LOADERS[""].node()

_OPTIONAL = ("negative_prompt", "num_images", "guidance_scale", "width", "height")


def generate_images(host: Host, *, policy: str, **values: Any) -> NodeResult:
    """The graph of Load Model, the policy's node and Generate Image.

    Args:
        host: makes the graph.
        policy: short name, or "auto" for an exact policy that suits the model.
        **values: of widgets of the other two nodes, as the page has them.
    """
    graph = host.graph()
    loaded = graph.node(LOAD.id, **_values_of(LOAD, values))
    made = graph.node(GENERATE.id, model=loaded.out(0), **_values_of(GENERATE, values))
    if policy != AUTO:
        made.set_input("policy", graph.node(policy_id(policy)).out(0))
    outputs = tuple(made.out(k) for k in range(len(GENERATE.outputs)))
    return NodeResult(outputs, graph=graph.finalize())


def check_values(*, policy: str, **values: Any) -> None:
    """Check what the other nodes check before anything is loaded.

    Raises:
        OptionError: no such policy, or a value that one of the other nodes refuses.
        MissingBackendError: see `check_model`.
    """
    if policy != AUTO:
        find_policy(policy)
    for spec in (LOAD, GENERATE):
        spec.check(**to_arguments(spec, _values_of(spec, values)))


def describe_model_files(**values: Any) -> str:
    """A text that changes when the files of the model change; empty where they are on the hub."""
    assert LOAD.fingerprint is not None
    return LOAD.fingerprint(**to_arguments(LOAD, _values_of(LOAD, values)))


def _values_of(spec: NodeSpec, values: Mapping[str, Any]) -> dict[str, Any]:
    return {w.name: values[w.name] for w in spec.widgets if w.name in values}


def _widget(name: str, **changes: Any) -> Widget:
    """A widget of the other nodes. What its values stand for is their affair."""
    found = next(w for w in (*LOAD.widgets, *GENERATE.widgets) if w.name == name)
    return replace(found, stands_for=(), old_name="", **changes)


TEXT_TO_IMAGE = NodeSpec(
    id=f"{PREFIX}TextToImage",
    title="MMAccel Text to Image",
    summary="Generates images from prompts in one node, which loads the model as well; the model "
    "stays loaded between runs.",
    inputs=(
        *(_widget(name, is_optional=False) for name in ("model", "prompt", "seed")),
        Widget(
            "policy",
            "choice",
            AUTO,
            "How to decode, with the policy's own defaults; auto is exact and suits the model.",
            choices=(AUTO, *POLICIES),
        ),
        *(_widget(name, is_optional=True, is_advanced=True) for name in _OPTIONAL),
    ),
    outputs=GENERATE.outputs,
    run=generate_images,
    check=check_values,
    fingerprint=describe_model_files,
    is_graph=True,
)
