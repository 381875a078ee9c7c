"""The sides of a measurement of caches: the full cache, and each method at each budget.

A budget is a fraction of the prompt. A method that evicts keeps so many of its entries; one that
chooses what a pass attends to reads so many of its blocks. A method whose budget is fixed by its
own fields is measured once. The controls are always among them: entries drawn by chance, and the
last ones alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mmaccel.catalog import METHODS, find_own, load, make
from mmaccel.checks import check_number, show, suggest
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.handle import attach
from mmaccel.pipelines.layers.methods import LayerMethods

FULL = "full cache"
SLOTS = ("kv_cache", "attention")
CHANCE = "random-eviction"
CONTROLS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("kv_cache", CHANCE, {}),
    ("kv_cache", "streaming-llm", {"sinks": 0}),
)


@dataclass(frozen=True)
class Method:
    """A method with its own settings, at any budget.

    Attributes:
        slot: one of `SLOTS`; empty for the full cache.
        name: of the catalog, of an entry point, or a `module:Name`.
        options: its fields.
    """

    slot: str = ""
    name: str = FULL
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its name with its own settings."""
        return ":".join((self.name, *(f"{k}={v}" for k, v in self.options.items())))

    @property
    def takes_budget(self) -> bool:
        """Whether its budget may be chosen: not where its own fields or another rule fix it, so
        that its budget is all by default.
        """
        if not self.slot or "budget" in self.options:
            return False
        entry = METHODS[self.slot].get(self.name)
        target = find_own(self.slot, self.name) if entry is None else entry.target
        assert target is not None
        preset = {} if entry is None else entry.preset
        defaults = {one.name: one.default for one in fields(load(target)) if one.init}
        return "budget" in defaults.keys() - preset.keys() and defaults["budget"] != 1.0


@dataclass(frozen=True)
class Side:
    """A way to answer the questions.

    Attributes:
        method: see `Method`.
        budget: fraction of the prompt; None where the method fixes it.
    """

    method: Method = field(default_factory=Method)
    budget: float | None = None

    @property
    def key(self) -> str:
        """What it is called in a report."""
        at = "" if self.budget is None else f" at {self.budget:g}"
        return f"{self.method.label}{at}"

    def make(self, n_tokens: int) -> LayerMethods:
        """What is done to the layers.

        Args:
            n_tokens: of the prompts, of which the budget is a fraction.

        Raises:
            OptionError: a budget that the method refuses.
        """
        if not self.method.slot:
            return LayerMethods()
        options = dict(self.method.options)
        if self.budget is not None:
            is_count = self.method.slot == "kv_cache"
            options["budget"] = max(1, round(self.budget * n_tokens)) if is_count else self.budget
        made = make(self.method.slot, self.method.name, **options)
        return LayerMethods(**{self.method.slot: made})


def parse_methods(named: Iterable[tuple[str, dict[str, Any]]]) -> list[Method]:
    """Methods, the controls first; none given: all of the catalog.

    Args:
        named: of the catalog, of an entry point, or a typed `module:Name`, with fields.

    Raises:
        OptionError: an unknown name.
    """
    controls = [Method(*control) for control in CONTROLS if control[1] in METHODS[control[0]]]
    chosen = [Method(_find_slot(name), name, options) for name, options in named]
    every = [Method(slot, name) for slot in SLOTS for name in METHODS[slot]]
    found: list[Method] = []
    for method in [*controls, *(chosen or every)]:
        if method not in found:
            found.append(method)
    return found


def _find_slot(name: str) -> str:
    for slot in SLOTS:
        if name in METHODS[slot]:
            return slot
    for slot in SLOTS:
        try:
            if find_own(slot, name) is not None:
                return slot
        except OptionError:
            if slot == SLOTS[-1]:
                raise
    known = [name for slot in SLOTS for name in METHODS[slot]]
    raise OptionError(
        f"--methods: expected some of {', '.join(known)}, received {show(name)}; "
        f"{suggest(name, known, 'controls are always measured')}"
    )


def parse_budgets(texts: Sequence[str]) -> list[float]:
    """Fractions in (0, 1), each once.

    Raises:
        OptionError: anything else, or none.
    """
    hint = "write for example --budgets 0.5,0.25; the full cache is always measured"
    budgets = []
    for text in texts or [""]:
        try:
            budget = float(text)
        except ValueError:
            budget = -1.0
        given = text if budget in (-1.0, 1.0) else budget
        check_number("--budgets", given, 0, 1, hint, above_low=True)
        budgets.append(budget)
    return list(dict.fromkeys(budgets))


def list_sides(
    model: Any, methods: Sequence[Method], budgets: Sequence[float], n_tokens: int
) -> tuple[list[Side], dict[str, str]]:
    """What a model can be measured with.

    Args:
        model: a causal LM of transformers.
        methods: of `parse_methods`.
        budgets: the fractions.
        n_tokens: of a prompt.

    Returns:
        The full cache, then the methods; and the reason why each of the others is left out.

    Raises:
        UnsupportedModelError: `attach` does not serve the model, or none of the methods.
    """
    with attach(model, "autoregressive", strict=True):
        pass
    sides = [Side()]
    left_out = {}
    for method in methods:
        for budget in budgets if method.takes_budget else [None]:
            side = Side(method, budget)
            try:
                made = side.make(n_tokens)
                with attach(
                    model, "autoregressive", kv_cache=made.kv_cache, attention=made.attention
                ):
                    sides.append(side)
            except (UnsupportedModelError, OptionError) as error:
                left_out[side.key] = " ".join(str(error).split())
    if len(sides) == 1:
        raise UnsupportedModelError(
            f"model: expected one that takes a method, received a {type(model).__name__}: "
            f"{next(iter(left_out.values()))}"
        )
    return sides, left_out
