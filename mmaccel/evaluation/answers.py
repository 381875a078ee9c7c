"""Answers to the same questions by every side, batch by batch, and what each cost.

A side's record is lists of one entry a round, ready for JSON: a stopped run goes on with the first
round that a side lacks. `right` has a character a question, "1" where its answer was right;
`sessions` the run that measured the round. Intervals (`mmaccel.evaluation.shares`) take questions
for independent; several about one image are not quite.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import compress
from statistics import fmean, median
from typing import Any, ClassVar

from mmaccel.checks import check_number
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.evaluation.measure import Case, Columns, Row, measure
from mmaccel.evaluation.questions import ALL, Question
from mmaccel.evaluation.shares import paired_difference, share_of
from mmaccel.handle import attach
from mmaccel.options import read_text

Record = dict[str, Any]


class AskedModel(ABC):
    """A model that is asked questions, under methods of one kind, and how its records are told."""

    option: ClassVar[str]  # of the levels, fractions that stay
    rows: ClassVar[str]  # names in a report: of the rows
    kind: ClassVar[str]  # … of kinds of questions
    level: ClassVar[str]  # … of a side's level
    whole: ClassVar[str]  # name of the first side, which does nothing, in comparisons
    chance: ClassVar[str]  # the side that draws what stays by chance
    # sides that tell which questions are easy, the best first: informative ones are those of
    # VTC-Bench (arXiv:2510.07143), which the first side answers rightly and plain downsampling to
    # the same level does not
    easy: ClassVar[Sequence[str]] = ()
    same: ClassVar[Sequence[str]]  # what has to be the same in a report to go on from
    # figures that are means over questions; None where they mean nothing
    counted: ClassVar[Sequence[str]]
    # seconds of a batch that are medians a question, over full batches
    timed: ClassVar[Sequence[str]]
    per_pass: ClassVar[Sequence[str]] = ()  # figures that are medians over full batches
    more: ClassVar[Sequence[str]] = ()
    columns: ClassVar[Columns]
    note: ClassVar[str]
    fields: ClassVar[Mapping[str, str]]  # of a question to names in a line of a file
    first: ClassVar[Side]
    demo: ClassVar[str]
    short: ClassVar[int]  # tokens of its answers at most
    model: Any
    is_demo: bool

    @classmethod
    def figures(cls) -> list[str]:
        own = [*cls.counted, *cls.timed, *cls.per_pass, *cls.more]
        return list(dict.fromkeys(["seconds", *own]))

    @classmethod
    def new_record(cls) -> Record:
        return {"right": "", "sessions": [], **{name: [] for name in cls.figures()}}

    @staticmethod
    @abstractmethod
    def list_sides(texts: Sequence[str], levels: Sequence[float]) -> list[Side]:
        """Sides of methods as they were typed, the controls first; without any: of all."""

    @staticmethod
    @abstractmethod
    def slots(made: Any) -> dict[str, Any]:
        """Options of `attach` for what `Side.make` returns."""

    def look_at(self, questions: Sequence[Question], max_new_tokens: int) -> dict[str, Any]:
        """Facts about the prompts for the report, after a look at their lengths."""
        return {}

    @abstractmethod
    def prepare(
        self, asked: Sequence[Question], seeds: Sequence[int], sides: Sequence[Side]
    ) -> Any:
        """What a round's sides take, made once for all, from its questions with a seed each."""

    @abstractmethod
    def answer(self, side: Side, inputs: Any, max_new_tokens: int) -> Mapping[str, Any]:
        """`texts` and `figures` of a side."""


@dataclass(frozen=True)
class Side:
    """A way to answer the questions: `make` says what is done to the model for so long prompts.

    `level` is the fraction that stays, None where the method fixes it; `group` is by default its
    key, and what the side is called where the model does not take it.
    """

    key: str
    name: str
    level: float | None
    make: Callable[[int], Any]
    facts: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""


def try_sides(
    asked: AskedModel, wanted: Sequence[Side], n_tokens: int
) -> tuple[list[Side], dict[str, str]]:
    """Sides that a model can be measured with, for prompts of so many tokens, and why other groups
    are left out; UnsupportedModelError where none is left.
    """
    with attach(asked.model, "autoregressive", strict=True):
        pass
    sides, left_out = [asked.first], {}
    for side in wanted:
        try:
            with attach(asked.model, "autoregressive", **asked.slots(side.make(n_tokens))):
                sides.append(side)
        except (UnsupportedModelError, OptionError) as error:
            left_out[side.group or side.key] = " ".join(str(error).split())
    if len(sides) == 1:
        raise UnsupportedModelError(
            f"model: expected one that takes a method, received a {type(asked.model).__name__}: "
            f"{next(iter(left_out.values()))}"
        )
    return sides, left_out


def parse_levels(option: str, texts: Sequence[str]) -> list[float]:
    """Fractions in (0, 1), each once."""
    levels = []
    for text in texts or [""]:
        level = read_text(option, text, float)
        hint = "write for example 0.5,0.22; all is always measured"
        check_number(option, text if level == 1 else level, 0, 1, hint, above_low=True)
        levels.append(level)
    return list(dict.fromkeys(levels))


def measure_answers(
    asked: AskedModel,
    questions: Sequence[Question],
    sides: Sequence[Side],
    records: dict[str, Record],
    *,
    batch: int,
    max_new_tokens: int,
    seed: int = 0,
    session: int = 0,
) -> Iterator[str]:
    """Fill the records by side, round by round; yields the key of the side that answered a batch.

    Question k has seed + k, for methods that draw.
    """
    done = {side.key: len(records[side.key]["seconds"]) for side in sides}
    n_rounds = -(-len(questions) // batch)

    @lru_cache(maxsize=1)
    def prepare(index: int) -> Any:
        part = questions[index * batch : (index + 1) * batch]
        seeds = [seed + index * batch + k for k in range(len(part))]
        return asked.prepare(part, seeds, sides)

    def answer(side: Side, inputs: Any) -> Mapping[str, Any]:
        return asked.answer(side, inputs, max_new_tokens)

    begun = min(done.values())
    if begun < n_rounds:  # warms up
        answer(next(side for side in sides if done[side.key] == begun), prepare(begun))
    cases = [Case(side.key, partial(answer, side), prepare) for side in sides]
    device = asked.model.device
    for run in measure(cases, n_rounds, warm_up=0, device=device, done=done):
        record, first = records[run["side"]], run["index"] * batch
        part = questions[first : first + batch]
        right = (one.is_right(text) for one, text in zip(part, run["texts"], strict=True))
        record["right"] += "".join("01"[verdict] for verdict in right)
        record["sessions"].append(session)
        for name in asked.figures():
            value = run[name]
            record[name].append(round(value, 6) if isinstance(value, float) else value)
        yield run["side"]


def summarise(
    topic: type[AskedModel],
    sides: Sequence[Side],
    records: Mapping[str, Record],
    kinds: Sequence[str],
    batch: int,
    *,
    only_answered: bool = False,
) -> list[Row]:
    """A row for each side that has answered something, ready for JSON.

    Returns:
        Rows with: `side`, `method`, the level, `questions`; `accuracy`, by kind and under "all";
        the topic's figures; `sessions`; `to_…` the first side and `to_random`, paired differences
        of accuracy; `informative`, the share of right answers to informative questions.
    """
    counted = [right == "1" or not only_answered for right in records[sides[0].key]["right"]]
    names, kinds = sorted(set(kinds)), [*compress(kinds, counted)]
    verdicts = {side.key: "".join(compress(records[side.key]["right"], counted)) for side in sides}
    at = {(side.name, side.level): verdicts[side.key] for side in sides}
    whole = verdicts[sides[0].key]
    rows = []
    for side in sides:
        right, record = verdicts[side.key], records[side.key]
        if not right:
            continue
        by_kind = {name: "" for name in names}
        for verdict, kind in zip(right, kinds, strict=False):
            by_kind[kind] += verdict
        is_whole = side is sides[0]
        chance = "" if side.name == topic.chance else at.get((topic.chance, side.level), "")
        easy = [at[name, side.level] for name in topic.easy if at.get((name, side.level))]
        row = {
            "side": side.key,
            **side.facts,
            topic.level: side.level,
            "questions": len(right),
            "accuracy": {kind: share_of(own) for kind, own in (by_kind | {ALL: right}).items()},
            **_costs(topic, record, batch),
            "sessions": sorted(set(record["sessions"])),
            f"to_{topic.whole}": None if is_whole else paired_difference(right, whole),
            "to_random": None if is_whole else paired_difference(right, chance),
        }
        if topic.easy:
            informative = keep_informative(right, whole, easy[0]) if easy and not is_whole else ""
            row["informative"] = share_of(informative)
        rows.append(row)
    return rows


def _costs(topic: type[AskedModel], record: Record, batch: int) -> dict[str, float | None]:
    answered = len(record["right"])
    sizes = [min(batch, answered - k * batch) for k in range(len(record["seconds"]))]
    full = [k for k, size in enumerate(sizes) if size == sizes[0]]
    costs: dict[str, float | None] = {}
    for name in topic.counted:
        known = [(x, float(size)) for x, size in zip(record[name], sizes) if x is not None]
        values, weights = zip(*known) if known else ((), ())
        costs[name] = fmean(values, weights=weights) if known else None
    for name in topic.timed:
        costs[name] = median(record[name][k] / sizes[k] for k in full)
    for name in topic.per_pass:
        costs[name] = median(record[name][k] for k in full)
    return costs


def keep_informative(right: str, whole: str, downsampled: str) -> str:
    """Of `right` the informative questions: `whole` has "1" and `downsampled` "0"."""
    every = zip(right, whole, downsampled, strict=False)
    return "".join(r for r, w, d in every if w == "1" and d == "0")


def digest_weights(model: Any) -> str:
    """Tells one model from another: by names, shapes and some numbers of its parameters."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        sample = weight.detach().flatten()[:: max(1, weight.numel() // 16)].float().cpu()
        digest.update(f"{name}{tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
