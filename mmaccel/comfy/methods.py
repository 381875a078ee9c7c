"""A node for each method of the catalog that another node takes, made from its dataclass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from mmaccel.catalog import KEEP, METHODS, POLICIES, load, make, make_policy
from mmaccel.checks import domains
from mmaccel.comfy.ports import (
    Node,
    Port,
    choice,
    choices_of,
    field_port,
    field_tooltips,
    number,
    text,
    unquoted,
    unset_number,
)
from mmaccel.errors import OptionError
from mmaccel.loading import pick_name
from mmaccel.reduction.visual_tokens.contract import TokenReducer, read_reducers
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.drafting.coarse_model import FOLDER
from mmaccel.weight_folders import check_files

_EXACTNESS = {
    "bitwise": "the same seed gives the same result as token by token",
    "distribution": "other results than token by token, from the same distribution",
    "relaxed": "other results than token by token, from another distribution",
}
_NOTES = {  # field -> tooltip, where Python takes more than a widget
    "cache": "What passes reuse: none is always right; prefix keeps what is left of the active "
    "block, dual everything but the block, vicinity everything but the block and the columns "
    "next to it; block keeps earlier blocks of a block-causal model, which is exact.",
    "draft_model": "A smaller model with the same vocabulary, from MMAccel Load Model; without "
    "one, drafts are looked up in the tokens so far.",
}
_SCORER = {  # the same of methods for visual tokens
    "scorer": "A method that ranks the tokens of a tile in place of the late layer, such as evs or "
    "random; its own budget is not used.",
}
_COARSE = text(
    "coarse_folder",
    "",
    "A folder with a coarse model, made for the generator that runs; it takes the place of what "
    "drafts says. Empty leaves that as it is.",
    read=unquoted,
)
_BEFORE = Port(
    "visual_tokens",
    "MMACCEL_VISUAL_TOKENS",
    "A method of another stage, to use both: one at the exit of the encoder, one inside the "
    "language model.",
    is_optional=True,
)
_BUDGET = (
    number("keep", KEEP, "The fraction of visual tokens that stays.", 0, 1, 0.01),
    unset_number("n_keep", 0, "The number that stays, instead of keep; None takes keep.", 0, 2**20),
)
_REDUCED = Port(
    "visual_tokens", "MMACCEL_VISUAL_TOKENS", "For Answer Question, or another Visual Tokens."
)
_LAYERS = {  # slot of methods for layers -> title, what its methods choose
    "kv_cache": ("KV Cache", "Which entries of a prompt stay in the caches"),
    "attention": ("Attention", "Which cached keys a pass attends to"),
}
LAYER_INPUTS = tuple(
    Port(slot, f"MMACCEL_{slot.upper()}", f"{what}; without one, all.", is_optional=True)
    for slot, (_, what) in _LAYERS.items()
)


@dataclass(frozen=True)
class NamedPolicy:
    """A policy and the short name it was chosen by."""

    name: str
    policy: Any


def choose_policy(policy: NamedPolicy | None, model: Any) -> NamedPolicy:
    """The policy of a link, else an exact one; OptionError: one of another kind of model, or one
    that drafts with the model itself.
    """
    name = pick_name(None if policy is None else policy.name, model)
    if policy is None:
        return NamedPolicy(name, make_policy(name))
    if getattr(policy.policy, "draft_model", None) is model:
        raise OptionError(
            "draft_model: expected another model than the one that is decoded, received the same; "
            "load a smaller one"
        )
    return policy


def build_policy(name: str, /, coarse_folder: str | None = None, **values: Any) -> Any:
    """`make_policy` with the folder of a coarse model as an input; OptionError as there, or no
    model.
    """
    if coarse_folder:
        check_files(FOLDER, coarse_folder)
        values["drafts"] = Coarse(coarse_folder)
    return make_policy(name, **values)


def _run_policy(name: str, /, **values: Any) -> tuple[NamedPolicy]:
    if values.get("draft_model") is not None:
        values["draft_model"] = values["draft_model"].pipe.model
    return (NamedPolicy(name, build_policy(name, **values)),)


def _build_reducer(
    method: str, /, *, keep: float = KEEP, n_keep: int | None = None, **values: Any
) -> TokenReducer:
    """A method for visual tokens; a number of tokens goes before a share."""
    how_many = {"keep": keep} if n_keep is None else {"n_keep": n_keep}
    reducer: TokenReducer = make("visual_tokens", method, **how_many, **values)
    return reducer


def _run_reducer(
    method: str, /, *, visual_tokens: Sequence[TokenReducer] | None = None, **values: Any
) -> tuple[tuple[TokenReducer, ...]]:
    """A method after those of another node."""
    scorer = values.get("scorer")
    if scorer is not None:
        values["scorer"] = scorer[0] if len(scorer) == 1 else scorer  # it refuses a chain
    return (read_reducers([*(visual_tokens or ()), _build_reducer(method, **values)]),)


def id_of(name: str, kind: str) -> str:
    """The id of a method's node by its short name, such as MMAccelMcSjdPolicy."""
    return f"MMAccel{name.title()}{kind}".replace("-", "").replace(" ", "")


def _inputs(slot: str, name: str, build: Callable[..., Any]) -> list[Port]:
    """The inputs of a method, one for each field that its short name leaves open. What `build`
    refuses is no choice.
    """
    entry = METHODS[slot][name]
    cls = load(entry.target)
    notes = field_tooltips(cls) | _NOTES | (_SCORER if slot == "visual_tokens" else {})

    def takes(field: str, text: str) -> bool:
        try:
            build(**{field: text})
        except OptionError:
            return False
        return True

    ports = []
    budget = ("keep", "n_keep") if slot == "visual_tokens" else ()
    for each in fields(cls):
        if each.init and each.name not in {*entry.preset, *budget}:
            known = choices_of(each, domains(cls).get(each.name))
            choices = [text for text in known if takes(each.name, text)]
            ports.append(field_port(each, notes[each.name], choices))
    return ports


def policy_node(name: str) -> Node:
    """The node of a policy."""
    entry = POLICIES[name]
    slot = entry.slot
    build = partial(build_policy, name)
    inputs = _inputs(slot, name, build)
    if any(each.name == "drafts" and each.kind == "COMBO" for each in inputs):
        inputs.append(_COARSE)
    exactness = build().exactness
    how = "token after token" if slot == "window" else "in any order"
    return Node(
        id_of(name, "Policy"),
        f"MMAccel Policy: {name}",
        f"mmaccel/policies/{slot}",
        f"{entry.summary[0].upper()}{entry.summary[1:]}. Exactness {exactness}: "
        f"{_EXACTNESS[exactness]}. For models that are decoded {how}.",
        inputs,
        [Port("policy", "MMACCEL_POLICY", f"The policy {name}, for Generate and Compare.")],
        run=partial(_run_policy, name),
        check=build,
    )


def reducer_node(name: str) -> Node:
    """The node of a method for visual tokens."""
    build = partial(_build_reducer, name)
    return Node(
        id_of(name, "Visual Tokens"),
        f"MMAccel Visual Tokens: {name}",
        "mmaccel/vision/visual tokens",
        f"Which visual tokens stay: {METHODS['visual_tokens'][name].summary}. Exactness relaxed: "
        "the answer may differ from that of all tokens.",
        [_BEFORE, *_BUDGET, *_inputs("visual_tokens", name, build)],
        [_REDUCED],
        run=partial(_run_reducer, name),
        check=build,
    )


def layer_node(slot: str, name: str) -> Node:
    """The node of a method for the layers' caches or attention."""
    title, what = _LAYERS[slot]
    build = partial(make, slot, name)
    return Node(
        id_of(name, title),
        f"MMAccel {title}: {name}",
        f"mmaccel/layers/{title.lower()}",
        f"{what}: {METHODS[slot][name].summary}. Exactness relaxed: the result may differ from "
        "that of all.",
        _inputs(slot, name, build),
        [Port(slot, f"MMACCEL_{slot.upper()}", "For the nodes that generate and answer.")],
        run=lambda **values: (build(**values),),
        check=build,
    )


REDUCE = Node(
    "MMAccelVisualTokens",
    "MMAccel Visual Tokens",
    "mmaccel/vision",
    "Chooses which visual tokens a vision-language model computes. All methods are relaxed: the "
    "answer may differ from that of all tokens.",
    [
        _BEFORE,
        choice(
            "method",
            "dart",
            f"How the tokens that stay are chosen. {', '.join(list(METHODS['visual_tokens'])[:3])} "
            "are controls that look at nothing in the image.",
            list(METHODS["visual_tokens"]),
        ),
        *_BUDGET,
    ],
    [_REDUCED],
    run=lambda method, **values: _run_reducer(method, **values),
    check=lambda method, **values: _build_reducer(method, **values),
)
METHOD_NODES = (
    *map(policy_node, POLICIES),
    *map(reducer_node, METHODS["visual_tokens"]),
    *(layer_node(slot, name) for slot in _LAYERS for name in METHODS[slot]),
)
