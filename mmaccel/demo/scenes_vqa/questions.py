"""Questions about busy scenes, with their answers, and the words they are made of.

Ten kinds. An answer is one word, two (a colour and a shape) or a number. Answers are balanced: of
all questions of a kind that a scene allows, the answer is drawn first, then a question that has it.
What is false is almost true: a `red star` is asked for where something red and a star are, but no
red star.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mmaccel.demo.scenes.layout import COLOURS, HORIZONTAL, SHAPES, SIZES, VERTICAL, Thing
from mmaccel.demo.scenes_vqa.layout import CANVAS, BusyScene

DIRECTIONS = (*HORIZONTAL, *VERTICAL)
_CLEAR = 5.0  # pixels by which a relation must hold
_NEARER = 5.0  # pixels by which the nearest object must be nearer than the next

Answers = dict[str, str]  # question -> its one right answer


@dataclass(frozen=True)
class Question:
    """A question and its one right answer."""

    kind: str
    text: str
    answer: str


def ask(
    rng: np.random.Generator, scene: BusyScene, per_kind: int | Mapping[str, int] = 1
) -> list[Question]:
    """Questions, no two alike, at most `per_kind` of each kind, or a number a kind."""
    found: dict[str, Question] = {}
    for kind, list_answers in KINDS.items():
        by_answer: dict[str, list[str]] = {}
        most = per_kind if isinstance(per_kind, int) else per_kind[kind]
        for text, answer in (list_answers(scene) if most else {}).items():
            by_answer.setdefault(answer, []).append(text)
        answers = list(by_answer)
        for _ in range(most if answers else 0):  # each answer that occurs is equally likely
            answer = answers[rng.integers(len(answers))]
            text = by_answer[answer][rng.integers(len(by_answer[answer]))]
            found.setdefault(text, Question(kind, text, answer))
    questions = list(found.values())
    return [questions[k] for k in rng.permutation(len(questions))]


def _looks(scene: BusyScene, asked: str, known: str, text: str) -> Answers:
    """Of objects that are the only ones of a colour or shape, or of it and a size."""
    answers = {}
    for thing in scene.objects:
        noun = {known: getattr(thing, known)}
        if _number(scene, **noun) == 1:
            answers[text.format(noun[known])] = str(getattr(thing, asked))
        elif _number(scene, size=thing.size, **noun) == 1:
            answers[text.format(f"{thing.size} {noun[known]}")] = str(getattr(thing, asked))
    return answers


def _counts(scene: BusyScene) -> Answers:
    counts = {"objects": len(scene.objects)}
    counts |= {f"{size} objects": _number(scene, size=size) for size in SIZES}
    counts |= {f"{colour} objects": _number(scene, colour=colour) for colour in COLOURS}
    counts |= {f"{shape}s": _number(scene, shape=shape) for shape in SHAPES}
    return {f"how many {what} are there?": str(n) for what, n in counts.items()}


def _sides(scene: BusyScene) -> Answers:
    answers = {}
    for thing in scene.objects:
        for low, high, way in (("left", "right", thing.x), ("above", "below", thing.y)):
            if abs(way - CANVAS / 2) >= _CLEAR:  # of the middle of the image
                text = f"is the {_noun(thing)} {low} or {high}?"
                answers[text] = low if way < CANVAS / 2 else high
    return answers


def _relations(scene: BusyScene) -> Answers:
    answers = {}
    for a in scene.objects:
        for b in scene.objects:
            for direction in DIRECTIONS:
                along, _ = _leads(b, a, direction)
                if abs(along) >= _CLEAR:
                    text = f"is the {_noun(a)} {direction} the {_noun(b)}?"
                    answers[text] = "yes" if along > 0 else "no"
    return answers


def _neighbours(scene: BusyScene) -> Answers:
    answers = {}
    for thing in scene.objects:
        for direction in DIRECTIONS:
            nearest = _find_nearest(scene, thing, direction)
            if nearest is not None:
                answers[f"which object is {direction} the {_noun(thing)}?"] = _noun(nearest)
    return answers


def _existences(scene: BusyScene) -> Answers:
    here = {_noun(thing) for thing in scene.objects}
    answers = {}
    for colour in dict.fromkeys(thing.colour for thing in scene.objects):
        article = "an" if colour == "orange" else "a"
        for shape in dict.fromkeys(thing.shape for thing in scene.objects):
            is_here = f"{colour} {shape}" in here
            answers[f"is there {article} {colour} {shape}?"] = "yes" if is_here else "no"
    return answers


KINDS: dict[str, Callable[[BusyScene], Answers]] = {
    "colour": lambda scene: _looks(scene, "colour", "shape", "what colour is the {}?"),
    "shape": lambda scene: _looks(scene, "shape", "colour", "what shape is the {} object?"),
    "size": lambda scene: {f"is the {_noun(t)} small or large?": t.size for t in scene.objects},
    "count": _counts,
    "relation": _relations,
    "neighbour": _neighbours,
    "exists": _existences,
    "sign": lambda scene: {
        f"what number is on the {s.colour} sign?": str(s.number) for s in scene.signs
    },
    "dot": lambda scene: {
        f"what colour is the dot on the {_noun(t)}?": t.dot for t in scene.objects if t.dot
    },
    "side": _sides,
}


def _find_nearest(scene: BusyScene, thing: Thing, direction: str) -> Thing | None:
    """The nearest object in a direction from a thing; None where that is not clear.

    An object lies in a direction if it is at least as far along it as across. One that is nearly
    so, and not clearly farther away than the nearest, makes it unclear.
    """
    inside, doubtful = [], []
    for other in scene.objects:
        along, across = _leads(thing, other, direction)
        far = math.hypot(along, across)
        if along > 0 and across <= 0.9 * along:
            inside.append((far, other))
        elif along > 0 and across <= 1.3 * along:
            doubtful.append(far)
    if not inside:
        return None
    inside.sort(key=lambda pair: pair[0])
    nearest, other = inside[0]
    rivals = doubtful + [far for far, _ in inside[1:]]
    return other if all(far >= nearest + _NEARER for far in rivals) else None


def _leads(start: Thing, end: Thing, direction: str) -> tuple[float, float]:
    """How far `end` lies from `start` along a direction and across it, pixels."""
    dx = end.x - start.x
    dy = end.y - start.y
    along = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[direction]
    return along, abs(dy if direction in HORIZONTAL else dx)


def _noun(thing: Thing) -> str:
    return f"{thing.colour} {thing.shape}"


def _number(scene: BusyScene, **wanted: str) -> int:
    return sum(all(getattr(t, k) == v for k, v in wanted.items()) for t in scene.objects)
