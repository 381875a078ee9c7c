"""Runs of window policies: prompts, drafts, models and folders that do not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch

import mmaccel
from mmaccel import Coarse, Comb, ContinuousBatching, Jacobi, Noise, SamplingParams
from mmaccel.contracts import Arrivals, Prompt
from mmaccel.errors import NumericsError, ShapeError, UnsupportedModelError
from mmaccel.pipelines.layers.store import KVCacheLayout, WindowLayer
from mmaccel.samplers.drafting.contract import Drafts, DraftSource
from mmaccel.samplers.drafting.sources import find_source
from mmaccel.samplers.scheduling import Scheduler
from mmaccel.samplers.window.policy import WindowPolicy
from tests.fixtures.coarse import strong_coarse
from tests.fixtures.graph_recorder import Recorder
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import ToyLanguage, make_prompt
from tests.messages.case import Refused


def _run(policy: Any, length: int = 4, rows: int = 2, model: Any = None, **given: Any) -> Any:
    """A run over two prompts."""

    def call() -> Any:
        params = given.get("params", SamplingParams())
        prompt = make_prompt([[1, 2, 3], [4]], layout=given.get("layout"))
        noise = Noise.from_seed(0, rows)
        own = Recorder([0.0] * 10) if model is None else model
        return policy.sample(own, prompt, length, params=params, noise=noise)

    return call


@dataclass(frozen=True)
class _Wrong(DraftSource):
    """Returns what a case gives it, for B rows, K drafts and V tokens."""

    returned: ClassVar[Any] = None

    def propose(self, frontier: Any) -> Any:
        rows, drafts = frontier.slots.shape
        return type(self).returned(rows, drafts, frontier.vocab_size)


ZERO = torch.zeros((), dtype=torch.int64)


def _proposal(name: str, returned: Any, *says: str) -> Refused:
    """A source that proposes something else than `Drafts` describes."""
    source = dataclass(frozen=True)(type("_Wrong", (_Wrong,), {"returned": staticmethod(returned)}))

    def call() -> Any:
        options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 8, "min_new_tokens": 8}
        model = build_lm("llama")
        with mmaccel.attach(model, Jacobi(window=5, drafts=source())):
            return model.generate(torch.tensor([[5, 6, 7], [9, 8, 3]]), **options)

    return Refused(name, call, says=("_Wrong.propose: expected ", *says), error=ShapeError)


def _arrivals(rows: int, branches: int, width: int, *, images: bool = False) -> Any:
    """Rows that join a run of two rows, in two branches where there are no images."""

    def call() -> Any:
        n = 1 if images else 2
        whole = make_prompt([[5, 9], [7, 8]] * n, n)
        tokens = torch.nn.functional.pad(whole.tokens, (0, 6))
        first = replace(whole, tokens=tokens)
        prompt: Prompt = make_prompt([[4] * width] * (rows * branches), branches)
        if images:
            prompt = replace(prompt, is_text=torch.ones_like(prompt.tokens, dtype=torch.bool))
        arrived = Arrivals(prompt, Noise.from_seed(list(range(rows)), rows))
        batching = ContinuousBatching(4, None, lambda most: arrived)
        return Scheduler(first, batching, Noise.from_seed([0, 1], 2)).receive(2)

    return call


def _own_policy(exactness: str, **fields: Any) -> Any:
    @dataclass(frozen=True)
    class Own(WindowPolicy):
        window: int | str = 8
        drafts: str = "left"

    Own.exactness = exactness  # type: ignore[assignment]
    return lambda: Own(**fields)


def _needs_states() -> Any:
    with TemporaryDirectory() as folder:
        source: Coarse = strong_coarse(torch.eye(10), Path(folder))
        return _run(Jacobi(6, source))()


def _store(prepared: bool) -> Any:
    layout = KVCacheLayout(rows=2, max_length=5)
    layer = WindowLayer(layout)
    if prepared:
        layout.prepare(torch.tensor([[0], [0]]), visible_length=5)
        return layer.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
    return layer.update(torch.ones(2, 1, 1, 2), torch.ones(2, 1, 1, 2))


class _Bare:
    columns = frame = 0


def _without_rows(name: str, layout: Any) -> Refused:
    found = find_source(name)
    assert found is not None
    return Refused(
        f"{name} without rows, {layout and 'in a layout'}",
        lambda: found.check_layout(layout),
        says=("expected", "received", "use drafts='left'"),
    )


INTS = ZERO.int()
CASES = (
    Refused("a length of 0", _run(Jacobi(3), 0), says=("length: expected", "received 0")),
    Refused(
        "noise of other rows",
        _run(Jacobi(3), rows=3),
        says=("noise: expected 2 rows, received 3",),
        error=ShapeError,
    ),
    Refused("rows above without a layout", _run(Jacobi(3, "above")), says=("drafts", "left")),
    *(_without_rows(name, layout) for name in ("above", "previous-frame")
      for layout in (None, _Bare())),
    Refused("a model without hidden states", _needs_states,
            says=("hands out its hidden states", "received a Recorder")),
    Refused(
        "a draft model of another vocabulary",
        _run(mmaccel.Speculative(3, ToyLanguage(4))),
        says=("vocabulary of 10, received 4",),
    ),
    *(Refused(f"a policy of one's own, {exactness}, {fields}", _own_policy(exactness, **fields),
              says=(says,))
      for exactness, fields, says in (
          ("bitwise", {"window": 0}, "window: expected an integer in 1..4096"),
          ("bitwise", {"drafts": "up"}, "drafts: expected one of"),
          ("relaxed", {"window": "adaptive"}, "window: expected an integer in 1..4096"),
      )),
    *(Refused(
        f"branches={branches} at a guidance of {scale}",
        lambda scale=scale, branches=branches: SamplingParams(guidance_scale=scale).apply(
            torch.zeros(6, 1, 3), branches, torch.zeros(6 // branches, 20).long(),
            torch.zeros(6 // branches, 1).long(), torch.zeros(6 // branches, 1).long(), None,
        ),
        says=("branches=2",),
        error=ShapeError,
    ) for scale, branches in ((2.0, 1), (2.0, 3), (1.0, 3))),
    Refused(
        "a tree for a model without trees",
        _run(Jacobi(8, "token-recycling", Comb(3, 4))),
        says=("take trees",),
    ),
    Refused(
        "scores of NaN",
        _run(Jacobi(4), model=Recorder([0.0, float("nan"), 0.0, 0.0, 0.0])),
        says=("scores: expected", "received NaN"),
        error=NumericsError,
    ),
    # drafts of other people
    _proposal("nothing", lambda b, k, v: Drafts(None, None), "Drafts(tokens=…) or Drafts("),
    _proposal("both", lambda b, k, v: Drafts(ZERO.expand(b, k), torch.zeros(b, k, v)), "tokens or"),
    _proposal("a tensor", lambda b, k, v: ZERO.expand(b, k), "Drafts(tokens=…) or Drafts("),
    _proposal("lists", lambda b, k, v: Drafts([[0] * k] * b, None), "received a list"),
    _proposal("too few", lambda b, k, v: Drafts(ZERO.expand(b, 1), None),
              "expected [2, 4] of int64, received [2, 1] of torch.int64"),
    _proposal("int32", lambda b, k, v: Drafts(INTS.expand(b, k), None), "received [2, 4]", "int32"),
    _proposal("padding", lambda b, k, v: Drafts(ZERO.expand(b, k) - 1, None), "received -1"),
    _proposal("too high", lambda b, k, v: Drafts(ZERO.expand(b, k) + v, None), "expected 0.."),
    _proposal("a narrow score", lambda b, k, v: Drafts(None, torch.zeros(b, k, v - 1)),
              "[2, 4, 40] of float", "received [2, 4, 39] of torch.float32"),
    _proposal("scores of int64", lambda b, k, v: Drafts(None, ZERO.expand(b, 1, v)), "torch.int64"),
    # rows that join
    Refused("too many rows", _arrivals(3, 2, 2), ("expected 1..2 rows of 2",), ShapeError),
    Refused("no branches", _arrivals(1, 1, 2), ("expected 1..2 rows of 2",), ShapeError),
    Refused("a long prompt", _arrivals(1, 2, 9), ("arrivals: expected 1..2 rows",), ShapeError),
    Refused("images", _arrivals(1, 1, 2, images=True), ("prompts of text alone",), ShapeError),
    # layers
    Refused("a store before its pass", lambda: _store(False), ("keys of 2 rows",), ShapeError),
    Refused("keys of other rows", lambda: _store(True), ("received [1, 1, 2, 2]",), ShapeError),
    *(Refused(
        f"layers that all slide: {options}",
        lambda options=options: mmaccel.attach(build_lm("mistral"), "jacobi", **options),
        says=("every layer sees the last 5 positions alone",),
        error=UnsupportedModelError,
    ) for options in ({"kv_cache": "snapkv"}, {"attention": "quest"})),
    Refused(
        "a tree over layers that all slide",
        lambda: mmaccel.attach(build_lm("mistral"), Jacobi(8, "token-recycling", Comb(3, 4))),
        says=("every layer",),
        error=UnsupportedModelError,
    ),
)  # fmt: skip
