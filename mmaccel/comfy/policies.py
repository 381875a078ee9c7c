"""One node for each policy of the catalog."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from mmaccel.canvas_contracts import kind_of
from mmaccel.catalog import POLICIES, make_policy
from mmaccel.comfy.policy_widgets import policy_inputs
from mmaccel.comfy.table import POLICY, PREFIX, Host, Made, NodeSpec, Output
from mmaccel.pipelines.text_to_image.model import pick_policy

_WHAT = {"window": "token after token", "canvas": "in any order"}
_PROMISES = {
    "bitwise": "the same seed makes the same result as token by token",
    "distribution": "other results than token by token, of the same law",
    "relaxed": "other results than token by token, and of another law",
}


@dataclass(frozen=True)
class NamedPolicy:
    """A policy and the short name it was chosen by."""

    name: str
    policy: Any


def choose_policy(host: Host, name: str, /, **fields: Any) -> Made:
    """Build a policy; a linked model becomes the model in it.

    Raises:
        OptionError: a bad value.
    """
    own = {key: getattr(value, "pipe", value) for key, value in fields.items()}
    own = {key: getattr(value, "model", value) for key, value in own.items()}
    return Made((NamedPolicy(name, make_policy(name, **own)),))


def default_policy(model: Any) -> NamedPolicy:
    """The exact policy a model is decoded by where none is chosen."""
    name = "jacobi" if kind_of(model) == "window" else "lossless-unmask"
    return NamedPolicy(name, pick_policy(None, model))


def policy_node(name: str) -> NodeSpec:
    """The node of a policy, by its short name."""
    entry = POLICIES[name]
    camel = "".join(word.capitalize() for word in name.split("-"))
    promise = make_policy(name).exactness

    def run(host: Host, **fields: Any) -> Made:
        return choose_policy(host, name, **fields)

    return NodeSpec(
        id=f"{PREFIX}{camel}Policy",
        title=f"MMAccel Policy: {name}",
        summary=f"{entry.summary[0].upper()}{entry.summary[1:]}. Promises {promise}: "
        f"{_PROMISES[promise]}. For models that are decoded {_WHAT[entry.kind]}.",
        inputs=policy_inputs(name),
        outputs=(Output("policy", POLICY, f"The policy {name}, for Generate and Compare."),),
        run=run,
        check=partial(make_policy, name),
        folder=f"policies/{entry.kind}",
    )
