"""Runs of window policies: prompts, drafts, models and folders that do not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import mmaccel
from mmaccel import Comb, Jacobi, Noise, SamplingParams
from mmaccel.errors import NumericsError, ShapeError, UnsupportedModelError
from mmaccel.samplers.drafting.contract import Drafts, DraftSource
from mmaccel.samplers.drafting.sources import find_source
from mmaccel.samplers.window.policy import WindowPolicy
from tests.fixtures.graph_recorder import Recorder
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.toy_models import make_prompt
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


def _own_policy(exactness: str, **fields: Any) -> Any:
    @dataclass(frozen=True)
    class Own(WindowPolicy):
        window: int | str = 8
        drafts: str = "left"

    Own.exactness = exactness  # type: ignore[assignment]
    return lambda: Own(**fields)


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


CASES = (
    Refused(
        "noise of other rows",
        _run(Jacobi(3), rows=3),
        says=("noise: expected 2 rows, received 3",),
        error=ShapeError,
    ),
    *(_without_rows(name, layout) for name in ("above", "previous-frame")
      for layout in (None, _Bare())),
    *(Refused(f"a policy of one's own, {exactness}, {fields}", _own_policy(exactness, **fields),
              says=(says,))
      for exactness, fields, says in (
          ("bitwise", {"window": 0}, "window: expected an integer in 1..4096"),
      )),
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
    _proposal("padding", lambda b, k, v: Drafts(ZERO.expand(b, k) - 1, None), "received -1"),
    # rows that join
    # layers
    *(Refused(
        f"layers that all slide: {options}",
        lambda options=options: mmaccel.attach(build_lm("mistral"), "jacobi", **options),
        says=("every layer sees the last 5 positions alone",),
        error=UnsupportedModelError,
    ) for options in ({"kv_cache": "snapkv"},)),
)  # fmt: skip
