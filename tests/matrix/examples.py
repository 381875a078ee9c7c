"""One table: how the tests make a method of the catalog, and what makes it change nothing.

A method whose fields all have defaults needs no row, if it changes no token: it is found by its
name. One that needs something else (a model, a folder, ids of the target) says here how it is made
for a `Target`, and a relaxed one says which of its settings decode as the reference does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import mmaccel
from mmaccel.catalog import METHODS, POLICIES, load, make_policy, read_method
from mmaccel.contracts import TokenModel
from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.draft_model import DraftModel
from mmaccel.samplers.drafting.lengths.disco import DISCO
from mmaccel.samplers.drafting.lengths.specdec_pp import SpecDecPP
from mmaccel.samplers.drafting.lengths.svip import SVIP
from mmaccel.samplers.drafting.memory.source_image import SourceImage
from mmaccel.samplers.drafting.memory.source_text import SourceText
from mmaccel.samplers.drafting.memory.suffix import Suffix
from mmaccel.samplers.drafting.parallel.pard import Pard
from mmaccel.samplers.drafting.sources import SOURCES


@dataclass(frozen=True)
class Target:
    """What an example is made for.

    Attributes:
        model: that decodes; window models have a coarse model.
        drafter: a small model with its vocabulary; None for a denoiser.
    """

    model: Any
    drafter: TokenModel | None = None


@dataclass(frozen=True)
class Example:
    """How the tests make a method.

    Attributes:
        make: from the target and the cell's fields.
        identities: fields with which a relaxed method decodes as the reference does; each is a
            case of its own.
        forms: fields that make another method of it; cells try each of them, too.
    """

    make: Callable[..., Any]
    identities: tuple[dict[str, Any], ...] = ()
    forms: tuple[dict[str, Any], ...] = ()


Fields = dict[str, Any]
Row = tuple[tuple[str, str], Example]


def _policy(
    name: str, identities: tuple[Fields, ...] = (), forms: tuple[Fields, ...] = (), **own: Any
) -> Row:
    def build(target: Target, **given: Any) -> Any:
        return make_policy(name, **own | given)

    return ("policies", name), Example(build, identities, forms)


def _method(slot: str, name: str, *identities: Fields, **own: Any) -> Row:
    def build(target: Target, **given: Any) -> Any:
        return read_method(slot, {"name": name, **own, **given})

    return (slot, name), Example(build, identities)


def _drafts(name: str, make: Callable[..., Any]) -> Row:
    return ("drafts", name), Example(make)


_POLICIES = (
    _policy(
        "stepwise",
        forms=(
            {"order": "random"},
            {"order": "halton"},
            {"order": "entropy"},
            {"order": "position"},
        ),
    ),
    _policy(
        "lossless-unmask",
        forms=({"order": "halton"}, {"order": "random"}, {"order": "position"}),
        drafts=4,
    ),
    (
        ("policies", "speculative"),
        Example(
            lambda target, **given: make_policy(
                "speculative", draft_model=None if "drafts" in given else target.drafter, **given
            )
        ),
    ),
    _policy("gsd", ({"group": 0},), group=1, max_gap=0.5),
    _policy("pcg", ({"radius": 0.0}, {"radius": 1e-6})),
    _policy("row-parallel", ({"ahead": 99},), ahead=1),
    _policy(
        "entropy-bounded",
        ({"gamma": 0.0}, {"gamma": None, "budget_nats": 0.0}),
        ({"gamma": None, "budget_nats": 6.0},),
        gamma=1.5,
    ),
    _policy(
        "confident-parallel",
        ({"threshold": 1.0}, {"rule": "frechet", "factor": 0.0}),
        ({"rule": "frechet", "factor": 3.0}, {"threshold": 0.6, "settled": 2.5}),
        threshold=0.2,
    ),
    _policy("kl-stable", ({"threshold": 1.0}, {"kl": 0.0}), kl=0.3, threshold=0.1, steps=1),
    _policy("local-leap", ({"anchor": 1.0},), anchor=0.3, radius=2, relaxed=0.15),
    _policy(
        "adaptive-block",
        ({"threshold": 1.0, "block": 2},),
        delimiters=(1,),
        tau=0.02,
        threshold=0.2,
    ),
    _policy(
        "revised-parallel",
        ({"threshold": 1.0, "revise": "edit", "budget": 0},),
        ({"revise": "shadow"}, {"revise": "redo"}),
        threshold=0.1,
        revise="edit",
        least=0.3,
        budget=2,
    ),
    _policy(
        "masked-parallel",
        (
            {"steps": None, "choose": "first"},
            {"steps": None, "order": "halton"},
            {"steps": 99, "order": "random", "schedule": "linear"},
        ),
        ({"choose": "first"}, {"order": "halton"}, {"order": "random"}),
        steps=3,
    ),
    _policy(
        "layered-parallel",
        ({"steps": 99, "shift": 1.0},),
        ({"penalty": 0.0, "choice": 0.0},),
        steps=3,
    ),
    _policy(
        "explore-exploit",
        ({"threshold": 1.0, "explore": 0}, {"threshold": 1.0, "least": 0}),
        threshold=0.3,
        least=3,
        explore=2,
    ),
    _policy(
        "learned-filter",
        ({"filter": "", "threshold": 1.0},),
        filter=lambda seen: seen.peak * 2,
        threshold=0.5,
    ),
    _policy("fast-var", ({"keep": (1.0,)},), keep=(0.5,)),
    _policy("fast-var-random", ({"keep": (1.0,)},), keep=(0.5,)),
)
_LENGTHS = {"svip": SVIP(0.8), "specdec++": SpecDecPP(0.6), "disco": DISCO(0.5)}
_DRAFTS = (
    # costs that are counted: with measured ones passes are those of the clock
    _drafts("bandit", lambda target: mmaccel.BanditSpec(token_cost=0.03)),
    _drafts("suffix", lambda target: Suffix(token_cost=0.03)),
    _drafts("lookahead", lambda target: mmaccel.Lookahead(pool=16)),
    _drafts("draft-model", lambda target: DraftModel(target.drafter)),
    *(
        _drafts(
            f"draft-model {name}", lambda target, rule=rule: DraftModel(target.drafter, length=rule)
        )
        for name, rule in _LENGTHS.items()
    ),
    _drafts("pard", lambda target: Pard(target.drafter, mask_token=1)),
    _drafts("source-text", lambda target: SourceText((1, 2, 3, 0, 1, 4, 2), ngram=1)),
    _drafts("source-image", lambda target: SourceImage((1, 2, 0, 3, 1, 4) * 3)),
)
_TREES: dict[str, Fields] = {
    "comb": {"branches": 3, "length": 2},
    "dyspec": {"nodes": 5, "depth": 2},
    "sequoia": {"nodes": 5, "depth": 2},
    "forked-comb": {"branches": 2, "length": 2, "twigs": 2, "twig_length": 1},
    "spec-exec": {"nodes": 9, "depth": 2, "expand": 3},
    "tetris": {"nodes": 6, "depth": 2, "budget": 4},
}
_EVICTING: dict[str, Fields] = {  # fields next to a budget of 9, of which 64 drops nothing
    "snapkv": {"window": 3},
    "pyramidkv": {"window": 3, "slope": 4},
    "chunkkv": {"chunk": 3, "window": 3},
    "citrus": {"instruction": 3},
    "tova": {},
    "h2o": {},
    "vatp": {"sinks": 2},
    "expected-attention": {"sinks": 2},
    "keydiff": {},
    "morphkv": {"window": 3},
    "linekv": {"every": 5, "lines": 1, "sinks": 2},
    "raas": {"every": 5, "threshold": 0.06},
    "kvzip": {"budget": 7, "sinks": 1, "piece": 11},
    "chelsea": {"chunk": 8, "sinks": 1, "recent": 2},
    "bilevelkv": {"chunk": 8, "pool": 4, "question": 2},
    "scale-kv": {"window": 4, "drafters": (1,)},
    "random-eviction": {},
    "streaming-llm": {"sinks": 3},
}
_ALL, _EVERY_BLOCK = {"budget": 64}, {"budget": 1}
_BLOCKS: Fields = {"block": 4, "first_layer": 0}
_BY_BUDGET = _BLOCKS | {"budget": 0.34}
_LAYERS = (
    *(_method("kv_cache", name, _ALL, **{"budget": 9} | own) for name, own in _EVICTING.items()),
    _method("kv_cache", "knorm", _ALL, {"first_layer": 99}, budget=9, first_layer=1),
    _method("kv_cache", "kvzap", _ALL, {"threshold": -99.0}, budget=2, threshold=-2.0, window=3),
    _method(
        "kv_cache", "duo-attention", _ALL, {"share": 0.0}, budget=6, sinks=2, share=0.9, window=3
    ),
    _method("kv_cache", "quantized-cache", {"residual": 64}, group=6, residual=5),
    *(
        _method("attention", name, _EVERY_BLOCK, **_BY_BUDGET)
        for name in ("act-qkv", "dhsa", "hip", "long-heads", "quest", "token-select")
    ),
    _method("attention", "top-p", {"p": 1}, p=0.5, **_BLOCKS),
    _method(
        "attention", "tidal-decode", _EVERY_BLOCK, {"first_layer": 1, "reselect": 2}, **_BY_BUDGET
    ),
    _method("attention", "x-attention", {"threshold": 1}, threshold=0.4, stride=2, **_BLOCKS),
    _method(
        "attention", "m-inference", _EVERY_BLOCK, {"block": 64}, budget=0.3, window=4, **_BLOCKS
    ),
    _method(
        "attention", "video-chunks", _EVERY_BLOCK, {"chunk": 64}, {"question": 64},
        budget=0.2, chunk=8, question=2, **_BLOCKS,
    ),
    _method("attention", "local-window", {"window": 64}, window=6, **_BLOCKS),
)  # fmt: skip
EXAMPLES: dict[tuple[str, str], Example] = dict(
    (
        *_POLICIES,
        *_DRAFTS,
        *(_method("tree", name, **own) for name, own in _TREES.items()),
        *_LAYERS,
    )
)


def names(slot: str, kind: str = "") -> list[str]:
    """Short names of a slot; of policies of a kind, where one is given."""
    if slot == "policies":  # languages have no layers: see tests/window/test_diagonals.py
        return [
            name
            for name, entry in POLICIES.items()
            if kind in ("", entry.slot) and name != "flashar"
        ]
    if slot == "drafts":  # `DraftModel` has no short name: it carries a model
        return [  # languages have no layers: see tests/layers/test_self_drafts.py
            *(name for name, source in SOURCES.items() if not source.needs_layers),
            *(name for where, name in EXAMPLES if where == slot and name not in SOURCES),
        ]
    return list(METHODS[slot])


def text_policies() -> list[str]:
    """Window policies that decode tokens which form no rows, too."""
    return [
        name for name in names("policies", "window") if not load(POLICIES[name].target).needs_rows
    ]


def make(slot: str, name: str, target: Target, **given: Any) -> Any:
    """An example of a method.

    Raises:
        AssertionError: a method that needs a row of `EXAMPLES` and has none.
    """
    own = EXAMPLES.get((slot, name))
    if own is not None:
        return own.make(target, **given)
    try:
        if slot == "drafts":
            return SOURCES[name]()
        if slot == "policies":
            return make_policy(name, **given)
        return read_method(slot, {"name": name, **given})
    except (OptionError, TypeError) as error:
        raise AssertionError(missing(slot, name, "how an example is made")) from error


def identities(slot: str, name: str) -> tuple[dict[str, Any], ...]:
    """Fields with which a relaxed method decodes as the reference does.

    Raises:
        AssertionError: none are declared.
    """
    own = EXAMPLES.get((slot, name))
    assert own is not None and own.identities, missing(slot, name, "with which it changes nothing")
    return own.identities


def forms(slot: str, name: str) -> tuple[dict[str, Any], ...]:
    """Fields of every form of a method that cells try."""
    own = EXAMPLES.get((slot, name))
    return ({},) if own is None else ({}, *own.forms)


def missing(slot: str, name: str, what: str) -> str:
    """What to do about a method that the tests cannot make."""
    return (
        f"{slot}: {name!r} is in the catalog, and the tests do not know {what}; add its row to "
        "EXAMPLES in tests/matrix/examples.py"
    )


def has_field(name: str, field: str) -> bool:
    """Whether a policy has a field, which its short name does not fix."""
    entry = POLICIES[name]
    own = {each.name for each in fields(load(entry.target))}
    return field in own and field not in entry.preset
