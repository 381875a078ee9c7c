"""Every canvas policy of the catalog, by the exactness it declares, against `Stepwise`.

Bitwise ones have its tokens in any order, block, cache and batch. Relaxed ones have its
distribution with settings that relax nothing. Of all of them a row is what it is alone, in a batch
and where it is admitted into another row's batch slot. `Stepwise` itself is proved in
`tests/exactness/test_canvas_distribution.py`, by enumeration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from mmaccel import CachePlan, ContinuousBatching, Noise, OptionError, SamplingParams, Stepwise
from mmaccel.contracts import FinishedRow, Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.evaluation.exactness.reference_models import ReferenceDenoiser
from mmaccel.results import Generation
from mmaccel.tokenizers_vq.grid import Grid
from tests.fixtures import canvas
from tests.fixtures.arriving import Arriving
from tests.fixtures.canvas import masked
from tests.fixtures.canvas_paths import enumerate_paths
from tests.fixtures.joints import families
from tests.fixtures.lanes import fast_first
from tests.fixtures.tiny_lms import VOCAB
from tests.fixtures.toy_models import make_prompt
from tests.matrix.cells import pairwise
from tests.matrix.examples import Target, forms, has_field, identities, make, names
from tests.matrix.test_batching import check_rows

CANVAS = [  # those of scales run in tests/canvas/test_scale_reductions.py
    name
    for name in names("policies", "canvas")
    if "scales" not in make("policies", name, Target(None)).needs
]
RELAXED = [name for name in CANVAS if make("policies", name, Target(None)).exactness == "relaxed"]
BITWISE = [name for name in CANVAS if name not in RELAXED and name != "stepwise"]
ORDERS = ["confidence", "entropy", "margin", "left", "random", "halton"]

ROWS = [[5, 9, 7], [8], [11, 6, 4, 21, 30], [3, 3], [17, 2, 9, 9], [25], [1, 12, 6]]
OTHERS = [[14, 2], [19, 22, 1, 3], [13], [2], [4, 4, 4], [9, 1], [30, 7, 7, 5]]
ALIKE = [[9, 2, 5, 1, 1, 4, 7], [13, 3, 9, 9, 2], [5], [2, 2], [4, 4, 4, 8]]
LENGTH, ALL, STOPS = 12, list(range(len(ALIKE))), torch.tensor([2, 3, 10, 15, 20, 26])
MODELS: dict[str, dict[str, Any]] = {
    "masked": {},
    "shifted": {"shift": 1},
    "uniform": {"mask_token": None},
    "block-causal": {"shift": 1, "block": 4},
}
PLANS: dict[str, dict[str, Any]] = {
    "none": {},
    "blocks": {"block": 4},
    "near": {"block": 4, "cache": CachePlan("none", far=2)},
    "dual": {"block": 4, "cache": CachePlan("dual", refresh=3)},
    "prefix": {"block": 6, "cache": CachePlan("prefix")},
    "vicinity": {"block": 4, "cache": CachePlan("vicinity", margin=2, refresh=2, far=2)},
}
CELLS: list[dict[str, Any]] = [
    {"model": "masked", "plan": "none", "guided": False, "grid": True},
    {"model": "shifted", "plan": "dual", "guided": True},
    {"model": "uniform", "plan": "vicinity", "guided": True},
    {"model": "masked", "plan": "blocks", "guided": False, "ends": True},
    {"model": "block-causal", "plan": "own", "guided": True},
]


@cache
def model_of(name: str) -> Any:
    """A decoder as a denoiser, in float64."""
    return masked(**MODELS[name])


@cache
def target() -> Target:
    return Target(model_of("masked"))


def prompt(cell: dict[str, Any], rows: list[int], width: int = 0) -> Prompt:
    """Rows of ragged prompts, whose branches end alike in the blocks of a block-causal model."""
    is_alike = cell["model"] == "block-causal"
    tokens = [(ALIKE if is_alike else ROWS)[row] for row in rows]
    tokens += [(ALIKE if is_alike else OTHERS)[row] for row in rows] * cell["guided"]
    layout = Grid(3, 4, VOCAB) if cell.get("grid") else None
    found = make_prompt(tokens, 1 + cell["guided"], width)
    return replace(found, stop_tokens=STOPS if cell.get("stops", True) else None, layout=layout)


def decode(
    policy: Any,
    cell: dict[str, Any],
    rows: list[int],
    batching: ContinuousBatching | None = None,
    width: int = 0,
    model: Any = None,
    **more: Any,
) -> Generation:
    params = {"guidance_scale": 1.7 if cell["guided"] else 1.0, "top_k": 20}
    params["temperature"] = cell.get("temperature", 1.0)
    made: Generation = policy.sample(
        model or model_of(cell["model"]),
        replace(prompt(cell, rows, width), batching=batching),
        LENGTH,
        params=SamplingParams(**params),
        noise=Noise.from_seed([100 + row for row in rows], len(rows)),
        **more,
    )
    return made


def fields_of(name: str, cell: dict[str, Any]) -> dict[str, Any]:
    """A policy's fields in a cell, as far as it has them."""
    given = PLANS.get(cell["plan"], {"cache": "block"})
    if cell.get("ends"):
        given = given | {"end_threshold": 0.05, "drop_suffix": True, "settled": 3.4}
    return {field: value for field, value in given.items() if has_field(name, field)}


def in_every_order(name: str) -> Iterator[dict[str, Any]]:
    """Cells of a policy that has the tokens of `Stepwise`, on decoders."""
    factors: dict[str, list[Any]] = {
        "plan": [*PLANS],
        "model": ["masked", "shifted", "uniform"],
        "order": ["confidence", "left", "random", "halton"],
        "guided": [False, True],
        "stops": [True, False],
        "temperature": [1.0, 0.0],
    }
    if has_field(name, "drafts"):
        factors["drafts"] = [4, 2, 5]
        factors["layout"] = [None, "rows", "entries"]
    yield from pairwise(factors)
    yield from pairwise(factors | {"plan": ["own", "none"], "model": ["block-causal"]})


@pytest.mark.slow
@pytest.mark.parametrize("name", BITWISE)
def test_bitwise_policies_have_the_tokens_of_stepwise(name: str) -> None:
    for cell in in_every_order(name):
        policy = make("policies", name, target(), **fields_of(name, cell), **own_fields(name, cell))
        order = cell["order"] if has_field(name, "order") else "auto"
        plain = decode(Stepwise(order, **fields_of("stepwise", cell)), cell, ALL)
        made = decode(policy, cell, ALL)
        assert made.tokens.equal(plain.tokens) and made.lengths.equal(plain.lengths), cell
        assert made.stats.exactness == policy.exactness, cell
        assert policy.exactness == ("bitwise" if as_exact(cell) else "relaxed")
        late = 0 if as_exact(cell) else len(ALL)  # refreshes draft nothing
        assert made.stats.passes <= plain.stats.passes + late, cell


def own_fields(name: str, cell: dict[str, Any]) -> dict[str, Any]:
    """A cell's fields that the policy has; canvases are no rows of a pass that reads a cache."""
    fields = ("order", "drafts", "block", "layout")
    own = {field: cell[field] for field in fields if field in cell and has_field(name, field)}
    if own.get("layout") == "rows" and cell.get("plan") not in ("none", "blocks", "near"):
        del own["layout"]
    return own


def as_exact(cell: dict[str, Any]) -> bool:
    """Whether a cell's cache changes nothing."""
    return cell["plan"] in ("none", "blocks", "own")


@pytest.mark.parametrize("name", BITWISE)
def test_bitwise_policies_on_joint_distributions(name: str) -> None:
    joints = families(6, 3)
    factors: dict[str, list[Any]] = {
        "joint": [*joints], "order": ORDERS, "temperature": [1.0, 0.0, 1.4],
        "block": [None, 3, 2], "stop": [None, [2]],
    }  # fmt: skip
    if has_field(name, "drafts"):
        factors["drafts"] = [4, 1, 2, 8]
    for cell in pairwise(factors):
        own = own_fields(name, cell)
        options = {"temperature": cell["temperature"], "noise": 11, "stop": cell["stop"]}
        plain, model = (ReferenceDenoiser(joints[cell["joint"]]) for _ in range(2))
        one = canvas.decode(Stepwise(cell["order"], cell["block"]), plain, 6, 12, **options)
        made = canvas.decode(make("policies", name, target(), **own), model, 6, 12, **options)
        assert made.tokens.equal(one.tokens) and made.lengths.equal(one.lengths), cell
        assert model.passes == made.stats.passes <= plain.passes
        assert made.stats.tokens == int(made.lengths.sum())
        assert int(made.passes.sum()) == made.stats.row_passes


@pytest.mark.parametrize("name", RELAXED)
def test_without_relaxation_it_is_stepwise_decoding(name: str) -> None:
    for fields in identities("policies", name):
        for joint in families(4, 3).values():
            policy = make("policies", name, target(), **fields)
            found = enumerate_paths(policy, ReferenceDenoiser(joint), 4, 3)
            off = float((found.joint - joint / joint.sum()).abs().sum() / 2)
            assert not found.sees_draws and off < 1e-6, fields


def in_every_batch() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Policy, fields and cell: a policy meets every cell, with one of its forms after the other."""
    for name in CANVAS:
        own = forms("policies", name)
        for turn in range(max(len(own), len(CELLS))):
            yield name, own[turn % len(own)], CELLS[turn % len(CELLS)]


@pytest.mark.parametrize(  # fast: each policy once
    ("name", "form", "cell"), fast_first(in_every_batch(), lambda case: {case[0]})
)
def test_a_row_is_the_row_alone(name: str, form: dict[str, Any], cell: dict[str, Any]) -> None:
    fields = fields_of(name, cell) | form
    try:
        policy = make("policies", name, target(), **fields)
        alone = [decode(policy, cell, [row]) for row in ALL]
    except (OptionError, UnsupportedModelError) as error:  # which says so before a pass
        assert cell["model"] in ("uniform", "block-causal"), error
        return
    drafts = has_field(name, "drafts")  # a pass that is some row's first has none
    whole = decode(policy, cell, ALL)
    assert_alone(whole, alone, counts=not drafts)
    assert whole.stats.passes <= LENGTH or name == "revised-parallel"
    if name != "revised-parallel":  # whose passes may only revise
        assert sum(whole.stats.accepted) == whole.stats.row_passes  # every pass commits
    for n in (1, 3):
        given: list[FinishedRow] = []
        made = decode(policy, cell, ALL, ContinuousBatching(n, given.append))
        assert_alone(made, alone, counts=not drafts or n == 1)
        check_rows(given, alone, counts=not drafts or n == 1)
    given = []
    arriving = Arriving(ALL[2:], lambda rows: prompt(cell, rows), 2)
    decode(policy, cell, [0, 1], ContinuousBatching(4, given.append, arriving), width=7)
    if not arriving.waiting:  # otherwise the run was empty before they came
        check_rows(given, alone, counts=not drafts)


def assert_alone(made: Generation, alone: list[Generation], *, counts: bool) -> None:
    """Rows of a batch: tokens, and passes where they are the row's own."""
    for row, own in enumerate(alone):
        assert made.tokens[row].equal(own.tokens[0]), f"row {row}"
        assert int(made.lengths[row]) == int(own.lengths[0])
        assert not counts or int(made.passes[row]) == int(own.passes[0])
    assert made.stats.tokens == sum(own.stats.tokens for own in alone)
    if counts:
        assert made.stats.row_passes == sum(own.stats.row_passes for own in alone)
        nats = sum(own.stats.nats for own in alone)
        assert made.stats.nats == pytest.approx(nats, rel=1e-9, abs=1e-12)
