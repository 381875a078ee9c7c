"""A node for each method of the catalog that another node takes, made from its dataclass.

Policies have one of the slots window and canvas; methods for visual tokens and for layers have
theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from mmaccel.catalog import KEEP, METHODS, POLICIES, find_policy, load, make, make_policy
from mmaccel.comfy.fields import Numbers, choices_of, field_input, field_tooltips, number
from mmaccel.comfy.loading import LoadedModel
from mmaccel.comfy.table import (
    POLICY,
    PREFIX,
    VISUAL_TOKENS,
    Host,
    NodeResult,
    NodeSpec,
    Output,
    Socket,
    Widget,
)
from mmaccel.errors import OptionError
from mmaccel.reduction.visual_tokens.contract import TokenReducer, check_reducers
from mmaccel.samplers.drafting.coarse import Coarse
from mmaccel.samplers.drafting.coarse_model import check_coarse

_HOW = {"window": "token after token", "canvas": "in any order"}
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
_SLOT_NOTES = {  # slot -> the same, of its methods alone
    "visual_tokens": {
        "scorer": "A method that ranks the tokens of a tile in place of the late layer, such as "
        "evs or random; its own budget is not used.",
    },
}
_COARSE = Widget(
    "coarse_folder",
    "path",
    "",
    "A folder with a coarse model, made for the generator that runs; it takes the place of what "
    "drafts says. Empty leaves that as it is.",
)
_BUDGET = (
    Widget("keep", "float", KEEP, "The fraction of visual tokens that stays.", 0, 1, 0.01),
    number(
        "n_keep",
        "int",
        0,
        "The number that stays, instead of keep; None takes keep.",
        Numbers(1, 2**20, 1, (0, None)),
    ),
)
_REDUCED = Output("visual_tokens", VISUAL_TOKENS, "For Answer Question, or another Visual Tokens.")
_LAYERS = {  # slot of methods for layers -> title, what its methods choose
    "kv_cache": ("KV Cache", "Which entries of a prompt stay in the caches"),
    "attention": ("Attention", "Which cached keys a pass attends to"),
}
LAYER_INPUTS = tuple(
    Socket(slot, f"MMACCEL_{slot.upper()}", f"{what}; without one, all.", is_optional=True)
    for slot, (_, what) in _LAYERS.items()
)
_BEFORE = Socket(
    "visual_tokens",
    VISUAL_TOKENS,
    "A method of another stage, to use both: one at the exit of the encoder, one inside the "
    "language model.",
    is_optional=True,
)


@dataclass(frozen=True)
class NamedPolicy:
    """A policy and the short name it was chosen by."""

    name: str
    policy: Any


@dataclass(frozen=True)
class Reducers:
    """Methods for visual tokens of different stages."""

    methods: tuple[TokenReducer, ...]


def build_policy(name: str, /, coarse_folder: str = "", **values: Any) -> Any:
    """`make_policy` with the folder of a coarse model as an input of its own.

    Raises:
        OptionError: a bad value, or a folder without a coarse model.
    """
    if coarse_folder:
        check_coarse(Path(coarse_folder))
        values["drafts"] = Coarse(coarse_folder)
    return make_policy(name, **values)


def choose_policy(policy: NamedPolicy | None, kind: str) -> NamedPolicy:
    """The policy that a socket brings, or an exact one where none is linked.

    Args:
        policy: of the socket.
        kind: of the model that it decodes, "window" or "canvas".

    Raises:
        OptionError: a policy for another kind of model.
    """
    if policy is None:
        name = "jacobi" if kind == "window" else "lossless-unmask"
        return NamedPolicy(name, make_policy(name))
    find_policy(policy.name, kind)
    return policy


def policy_id(name: str) -> str:
    """The id of a policy's node."""
    return f"{PREFIX}{_words(name)}Policy"


def policy_node(name: str) -> NodeSpec:
    """The node of a policy, by its short name."""
    entry = POLICIES[name]
    exactness = make_policy(name).exactness

    def run(host: Host, **values: Any) -> NodeResult:
        linked = {key: _token_model(value) for key, value in values.items()}
        return NodeResult((NamedPolicy(name, build_policy(name, **linked)),))

    return NodeSpec(
        id=policy_id(name),
        title=f"MMAccel Policy: {name}",
        summary=f"{_begin(entry.summary)}. Exactness {exactness}: {_EXACTNESS[exactness]}. "
        f"For models that are decoded {_HOW[entry.slot]}.",
        inputs=policy_inputs(name),
        outputs=(Output("policy", POLICY, f"The policy {name}, for Generate and Compare."),),
        run=run,
        check=partial(build_policy, name),
        folder=f"policies/{entry.slot}",
    )


def policy_inputs(name: str) -> tuple[Widget | Socket, ...]:
    """The inputs of a policy's node, one for each field its short name leaves open.

    A policy that takes a coarse model has an input for its folder as well.
    """
    entry = POLICIES[name]
    inputs = method_inputs(entry.slot, name, partial(make_policy, name))
    drafts = [f for f in fields(load(entry.target)) if "DraftSource" in str(f.type)]
    is_open = any(f.name not in entry.preset for f in drafts)
    return (*inputs, _COARSE) if is_open else inputs


def method_inputs(
    slot: str, name: str, build: Callable[..., Any], without: Sequence[str] = ()
) -> tuple[Widget | Socket, ...]:
    """The inputs of a method, one for each field that its short name leaves open.

    Args:
        slot: one of `METHODS`.
        name: its short name.
        build: makes the method of fields; what it refuses is no choice.
        without: fields that have inputs of another form.
    """
    entry = METHODS[slot][name]
    cls = load(entry.target)
    notes = field_tooltips(cls) | _NOTES | _SLOT_NOTES.get(slot, {})
    left_out = {*entry.preset, *without}
    return tuple(
        field_input(field, notes[field.name], _taken(build, field.name))
        for field in fields(cls)
        if field.init
        if field.name not in left_out
    )


def _taken(build: Callable[..., Any], field: str) -> tuple[str, ...]:
    """The choices of a field that a method takes."""
    return tuple(text for text in choices_of(field) if _takes(build, field, text))


def _takes(build: Callable[..., Any], field: str, text: str) -> bool:
    try:
        build(**{field: text})
    except OptionError:
        return False
    return True


def _token_model(value: Any) -> Any:
    """The token model of a linked loaded model; other values as they are."""
    return value.pipe.model if isinstance(value, LoadedModel) else value


def build_reducer(
    method: str, /, *, keep: float = KEEP, n_keep: int | None = None, **values: Any
) -> Any:
    """A method for visual tokens; a number of tokens goes before a share.

    Raises:
        OptionError: a bad value.
    """
    how_many: Mapping[str, Any] = {"keep": keep} if n_keep is None else {"n_keep": n_keep}
    return make("visual_tokens", method, **how_many, **values)


def chain(visual_tokens: Reducers | None, reducer: TokenReducer) -> NodeResult:
    """A method after those of another node.

    Raises:
        OptionError: two methods of one stage.
    """
    before = () if visual_tokens is None else visual_tokens.methods
    return NodeResult((Reducers(check_reducers([*before, reducer])),))


def reducer_node(name: str) -> NodeSpec:
    """The node of a method for visual tokens, with its own fields."""
    summary = METHODS["visual_tokens"][name].summary

    def run(host: Host, *, visual_tokens: Reducers | None = None, **values: Any) -> NodeResult:
        linked = {key: _only_method(value) for key, value in values.items()}
        return chain(visual_tokens, build_reducer(name, **linked))

    return NodeSpec(
        id=f"{PREFIX}{_words(name)}VisualTokens",
        title=f"MMAccel Visual Tokens: {name}",
        summary=f"Which visual tokens stay: {summary}. Exactness relaxed: the answer may differ "
        "from that of all tokens.",
        inputs=(
            _BEFORE,
            *_BUDGET,
            *method_inputs(
                "visual_tokens", name, partial(build_reducer, name), without=("keep", "n_keep")
            ),
        ),
        outputs=(_REDUCED,),
        run=run,
        check=partial(build_reducer, name),
        folder="vision/visual tokens",
    )


def layer_node(slot: str, name: str) -> NodeSpec:
    """The node of a method for the layers' caches or attention, with its own fields."""
    title, what = _LAYERS[slot]
    build = partial(make, slot, name)
    (socket,) = (each for each in LAYER_INPUTS if each.name == slot)

    def run(host: Host, **values: Any) -> NodeResult:
        return NodeResult((build(**values),))

    return NodeSpec(
        id=f"{PREFIX}{_words(name)}{title.replace(' ', '')}",
        title=f"MMAccel {title}: {name}",
        summary=f"{what}: {METHODS[slot][name].summary}. Exactness relaxed: the result may differ "
        "from that of all.",
        inputs=method_inputs(slot, name, build),
        outputs=(Output(slot, socket.kind, "For the nodes that generate and answer."),),
        run=run,
        check=build,
        folder=f"layers/{title.lower()}",
    )


def _only_method(value: Any) -> Any:
    """The method of a linked node; other values as they are.

    Raises:
        OptionError: a chain of methods.
    """
    if not isinstance(value, Reducers):
        return value
    if len(value.methods) > 1:
        raise OptionError(
            f"scorer: expected one method, received a chain of {len(value.methods)}; link a node "
            "that has no other before it"
        )
    return value.methods[0]


def _reduce(
    host: Host, *, method: str, visual_tokens: Reducers | None = None, **values: Any
) -> NodeResult:
    return chain(visual_tokens, build_reducer(method, **values))


def _check_reducer(*, method: str, **values: Any) -> None:
    build_reducer(method, **values)


REDUCE = NodeSpec(
    id=f"{PREFIX}VisualTokens",
    title="MMAccel Visual Tokens",
    summary="Chooses which visual tokens a vision-language model computes. All methods are "
    "relaxed: the answer may differ from that of all tokens.",
    inputs=(
        _BEFORE,
        Widget(
            "method",
            "choice",
            "dart",
            f"How the tokens that stay are chosen. {', '.join(list(METHODS['visual_tokens'])[:3])} "
            "are controls that look at nothing in the image.",
            choices=tuple(METHODS["visual_tokens"]),
        ),
        *_BUDGET,
    ),
    outputs=(_REDUCED,),
    run=_reduce,
    check=_check_reducer,
    folder="vision",
)


def _words(name: str) -> str:
    """A short name as a part of a node's id."""
    return name.title().replace("-", "")


def _begin(text: str) -> str:
    return text[0].upper() + text[1:]
