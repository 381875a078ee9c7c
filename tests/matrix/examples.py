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


def _policy(name: str, **own: Any) -> Callable[..., Any]:
    return lambda target, **given: make_policy(name, **own | given)


def _method(slot: str, name: str, **own: Any) -> Callable[..., Any]:
    return lambda target, **given: read_method(slot, {"name": name, **own, **given})


EXAMPLES: dict[tuple[str, str], Example] = {
    ("policies", "stepwise"): Example(
        _policy("stepwise"),
        forms=(
            {"order": "random"},
            {"order": "halton"},
            {"order": "entropy"},
            {"order": "position"},
        ),
    ),
    ("policies", "lossless-unmask"): Example(
        _policy("lossless-unmask", drafts=4),
        forms=({"order": "halton"}, {"order": "random"}, {"order": "position"}),
    ),
    ("policies", "speculative"): Example(
        lambda target, **given: make_policy(
            "speculative", draft_model=None if "drafts" in given else target.drafter, **given
        )
    ),
    ("policies", "gsd"): Example(_policy("gsd", group=1, max_gap=0.5), ({"group": 0},)),
    ("policies", "pcg"): Example(_policy("pcg"), ({"radius": 0.0}, {"radius": 1e-6})),
    ("policies", "row-parallel"): Example(_policy("row-parallel", ahead=1), ({"ahead": 99},)),
    ("policies", "entropy-bounded"): Example(
        _policy("entropy-bounded", gamma=1.5),
        ({"gamma": 0.0}, {"gamma": None, "budget_nats": 0.0}),
        ({"gamma": None, "budget_nats": 6.0},),
    ),
    ("policies", "confident-parallel"): Example(
        _policy("confident-parallel", threshold=0.2),
        ({"threshold": 1.0}, {"rule": "frechet", "factor": 0.0}),
        ({"rule": "frechet", "factor": 3.0}, {"threshold": 0.6, "settled": 2.5}),
    ),
    ("policies", "kl-stable"): Example(
        _policy("kl-stable", kl=0.3, threshold=0.1, steps=1), ({"threshold": 1.0}, {"kl": 0.0})
    ),
    ("policies", "local-leap"): Example(
        _policy("local-leap", anchor=0.3, radius=2, relaxed=0.15), ({"anchor": 1.0},)
    ),
    ("policies", "adaptive-block"): Example(
        _policy("adaptive-block", delimiters=(1,), tau=0.02, threshold=0.2),
        ({"threshold": 1.0, "block": 2},),
    ),
    ("policies", "revised-parallel"): Example(
        _policy("revised-parallel", threshold=0.1, revise="edit", least=0.3, budget=2),
        ({"threshold": 1.0, "revise": "edit", "budget": 0},),
        ({"revise": "shadow"}, {"revise": "redo"}),
    ),
    ("policies", "masked-parallel"): Example(
        _policy("masked-parallel", steps=3),
        (
            {"steps": None, "choose": "first"},
            {"steps": None, "order": "halton"},
            {"steps": 99, "order": "random", "schedule": "linear"},
        ),
        ({"choose": "first"}, {"order": "halton"}, {"order": "random"}),
    ),
    ("policies", "layered-parallel"): Example(
        _policy("layered-parallel", steps=3),
        ({"steps": 99, "shift": 1.0},),
        ({"penalty": 0.0, "choice": 0.0},),
    ),
    ("policies", "explore-exploit"): Example(
        _policy("explore-exploit", threshold=0.3, least=3, explore=2),
        ({"threshold": 1.0, "explore": 0}, {"threshold": 1.0, "least": 0}),
    ),
    ("policies", "learned-filter"): Example(
        _policy("learned-filter", filter=lambda seen: seen.peak * 2, threshold=0.5),
        ({"filter": "", "threshold": 1.0},),
    ),
    ("policies", "fast-var"): Example(_policy("fast-var", keep=(0.5,)), ({"keep": (1.0,)},)),
    ("policies", "fast-var-random"): Example(
        _policy("fast-var-random", keep=(0.5,)), ({"keep": (1.0,)},)
    ),
    # costs that are counted: with measured ones passes are those of the clock
    ("drafts", "bandit"): Example(lambda target: mmaccel.BanditSpec(token_cost=0.03)),
    ("drafts", "suffix"): Example(lambda target: Suffix(token_cost=0.03)),
    ("drafts", "lookahead"): Example(lambda target: mmaccel.Lookahead(pool=16)),
    ("drafts", "draft-model"): Example(lambda target: DraftModel(target.drafter)),
    **{
        ("drafts", f"draft-model {name}"): Example(
            lambda target, rule=rule: DraftModel(target.drafter, length=rule)
        )
        for name, rule in {
            "svip": SVIP(0.8),
            "specdec++": SpecDecPP(0.6),
            "disco": DISCO(0.5),
        }.items()
    },
    ("drafts", "pard"): Example(lambda target: Pard(target.drafter, mask_token=1)),
    ("drafts", "source-text"): Example(lambda target: SourceText((1, 2, 3, 0, 1, 4, 2), ngram=1)),
    ("drafts", "source-image"): Example(lambda target: SourceImage((1, 2, 0, 3, 1, 4) * 3)),
    ("tree", "comb"): Example(_method("tree", "comb", branches=3, length=2)),
    ("tree", "dyspec"): Example(_method("tree", "dyspec", nodes=5, depth=2)),
    ("tree", "sequoia"): Example(_method("tree", "sequoia", nodes=5, depth=2)),
    ("tree", "forked-comb"): Example(
        _method("tree", "forked-comb", branches=2, length=2, twigs=2, twig_length=1)
    ),
    ("tree", "spec-exec"): Example(_method("tree", "spec-exec", nodes=9, depth=2, expand=3)),
    ("tree", "tetris"): Example(_method("tree", "tetris", nodes=6, depth=2, budget=4)),
    ("kv_cache", "snapkv"): Example(
        _method("kv_cache", "snapkv", budget=9, window=3), ({"budget": 64},)
    ),
    ("kv_cache", "pyramidkv"): Example(
        _method("kv_cache", "pyramidkv", budget=9, window=3, slope=4), ({"budget": 64},)
    ),
    ("kv_cache", "chunkkv"): Example(
        _method("kv_cache", "chunkkv", budget=9, chunk=3, window=3), ({"budget": 64},)
    ),
    ("kv_cache", "citrus"): Example(
        _method("kv_cache", "citrus", budget=9, instruction=3), ({"budget": 64},)
    ),
    ("kv_cache", "tova"): Example(_method("kv_cache", "tova", budget=9), ({"budget": 64},)),
    ("kv_cache", "h2o"): Example(_method("kv_cache", "h2o", budget=9), ({"budget": 64},)),
    ("kv_cache", "vatp"): Example(
        _method("kv_cache", "vatp", budget=9, sinks=2), ({"budget": 64},)
    ),
    ("kv_cache", "expected-attention"): Example(
        _method("kv_cache", "expected-attention", budget=9, sinks=2), ({"budget": 64},)
    ),
    ("kv_cache", "knorm"): Example(
        _method("kv_cache", "knorm", budget=9, first_layer=1), ({"budget": 64}, {"first_layer": 99})
    ),
    ("kv_cache", "keydiff"): Example(_method("kv_cache", "keydiff", budget=9), ({"budget": 64},)),
    ("kv_cache", "morphkv"): Example(
        _method("kv_cache", "morphkv", budget=9, window=3), ({"budget": 64},)
    ),
    ("kv_cache", "linekv"): Example(
        _method("kv_cache", "linekv", budget=9, every=5, lines=1, sinks=2), ({"budget": 64},)
    ),
    ("kv_cache", "raas"): Example(
        _method("kv_cache", "raas", budget=9, every=5, threshold=0.06), ({"budget": 64},)
    ),
    ("kv_cache", "kvzap"): Example(
        _method("kv_cache", "kvzap", budget=2, threshold=-2.0, window=3),
        ({"budget": 64}, {"threshold": -99.0}),
    ),
    ("kv_cache", "kvzip"): Example(
        _method("kv_cache", "kvzip", budget=7, sinks=1, piece=11), ({"budget": 64},)
    ),
    ("kv_cache", "chelsea"): Example(
        _method("kv_cache", "chelsea", budget=9, chunk=8, sinks=1, recent=2), ({"budget": 64},)
    ),
    ("kv_cache", "bilevelkv"): Example(
        _method("kv_cache", "bilevelkv", budget=9, chunk=8, pool=4, question=2), ({"budget": 64},)
    ),
    ("kv_cache", "duo-attention"): Example(
        _method("kv_cache", "duo-attention", budget=6, sinks=2, share=0.9, window=3),
        ({"budget": 64}, {"share": 0.0}),
    ),
    ("kv_cache", "scale-kv"): Example(
        _method("kv_cache", "scale-kv", budget=9, window=4, drafters=(1,)), ({"budget": 64},)
    ),
    ("kv_cache", "quantized-cache"): Example(
        _method("kv_cache", "quantized-cache", group=6, residual=5), ({"residual": 64},)
    ),
    ("kv_cache", "random-eviction"): Example(
        _method("kv_cache", "random-eviction", budget=9), ({"budget": 64},)
    ),
    ("kv_cache", "streaming-llm"): Example(
        _method("kv_cache", "streaming-llm", budget=9, sinks=3), ({"budget": 64},)
    ),
    **{
        ("attention", name): Example(
            _method("attention", name, budget=0.34, block=4, first_layer=0), ({"budget": 1},)
        )
        for name in ("act-qkv", "dhsa", "hip", "long-heads", "quest", "token-select")
    },
    ("attention", "top-p"): Example(
        _method("attention", "top-p", p=0.5, block=4, first_layer=0), ({"p": 1},)
    ),
    ("attention", "tidal-decode"): Example(
        _method("attention", "tidal-decode", budget=0.34, block=4, first_layer=0),
        ({"budget": 1}, {"first_layer": 1, "reselect": 2}),
    ),
    ("attention", "x-attention"): Example(
        _method("attention", "x-attention", threshold=0.4, stride=2, block=4, first_layer=0),
        ({"threshold": 1},),
    ),
    ("attention", "m-inference"): Example(
        _method("attention", "m-inference", budget=0.3, window=4, block=4, first_layer=0),
        ({"budget": 1}, {"block": 64}),
    ),
    ("attention", "video-chunks"): Example(
        _method(
            "attention", "video-chunks", budget=0.2, chunk=8, question=2, block=4, first_layer=0
        ),
        ({"budget": 1}, {"chunk": 64}, {"question": 64}),
    ),
    ("attention", "local-window"): Example(
        _method("attention", "local-window", window=6, block=4, first_layer=0), ({"window": 64},)
    ),
}


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
