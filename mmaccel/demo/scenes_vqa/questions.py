"""Questions about busy scenes, with their answers, and the words they are made of.

Ten kinds. An answer is one word, two (a colour and a shape) or a number. Answers are balanced: of
all questions of a kind that a scene allows, the answer is drawn first, then a question that has it.
What is false is almost true: a `red star` is asked for where something red and a star are, but no
red star.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mmaccel.demo.scenes.layout import COLOURS, SHAPES, SIZES
from mmaccel.demo.scenes_vqa.layout import CANVAS, BusyScene, Thing

DIRECTIONS = ("left of", "right of", "above", "below")
_CLEAR = 5.0  # pixels by which a relation must hold
_NEARER = 5.0  # pixels by which the nearest object must be nearer than the next


@dataclass(frozen=True)
class Question:
    """A question and its one right answer."""

    kind: str
    text: str
    answer: str


def ask(
    rng: np.random.Generator, scene: BusyScene, per_kind: int | Mapping[str, int] = 1
) -> list[Question]:
    """Asks about a scene.

    Args:
        rng: where the choice comes from.
        scene: what is asked about.
        per_kind: most questions of each kind, or a number a kind; fewer where the scene has no
            more.

    Returns:
        Questions, no two alike, in an order of `rng`.
    """
    found: dict[str, Question] = {}
    for kind, list_texts in KINDS.items():
        by_answer: dict[str, list[str]] = {}
        most = per_kind if isinstance(per_kind, int) else per_kind[kind]
        for text, answer in (list_texts(scene) if most else {}).items():
            by_answer.setdefault(answer, []).append(text)
        answers = list(by_answer)
        for _ in range(most if answers else 0):  # each answer that occurs is equally likely
            answer = answers[rng.integers(len(answers))]
            text = by_answer[answer][rng.integers(len(by_answer[answer]))]
            found.setdefault(text, Question(kind, text, answer))
    questions = list(found.values())
    return [questions[k] for k in rng.permutation(len(questions))]


def _colours(scene: BusyScene) -> dict[str, str]:
    texts = {}
    for thing in scene.things:
        if _is_only(scene, shape=thing.shape):
            texts[f"what colour is the {thing.shape}?"] = thing.colour
        elif _is_only(scene, shape=thing.shape, size=thing.size):
            texts[f"what colour is the {thing.size} {thing.shape}?"] = thing.colour
    return texts


def _shapes(scene: BusyScene) -> dict[str, str]:
    texts = {}
    for thing in scene.things:
        if _is_only(scene, colour=thing.colour):
            texts[f"what shape is the {thing.colour} object?"] = thing.shape
        elif _is_only(scene, colour=thing.colour, size=thing.size):
            texts[f"what shape is the {thing.size} {thing.colour} object?"] = thing.shape
    return texts


def _sizes(scene: BusyScene) -> dict[str, str]:
    return {f"is the {_noun(t)} small or large?": t.size for t in scene.things}


def _counts(scene: BusyScene) -> dict[str, str]:
    counts = {"objects": len(scene.things)}
    counts |= {f"{size} objects": _number(scene, size=size) for size in SIZES}
    counts |= {f"{colour} objects": _number(scene, colour=colour) for colour in COLOURS}
    counts |= {f"{shape}s": _number(scene, shape=shape) for shape in SHAPES}
    return {f"how many {what} are there?": str(n) for what, n in counts.items()}


def _sides(scene: BusyScene) -> dict[str, str]:
    texts = {}
    for thing in scene.things:
        for low, high, way in (("left", "right", thing.x), ("above", "below", thing.y)):
            if abs(way - CANVAS / 2) >= _CLEAR:  # of the middle of the image
                text = f"is the {_noun(thing)} {low} or {high}?"
                texts[text] = low if way < CANVAS / 2 else high
    return texts


def _relations(scene: BusyScene) -> dict[str, str]:
    texts = {}
    for a in scene.things:
        for b in scene.things:
            for direction in DIRECTIONS:
                along, _ = _leads(b, a, direction)
                if abs(along) >= _CLEAR:
                    text = f"is the {_noun(a)} {direction} the {_noun(b)}?"
                    texts[text] = "yes" if along > 0 else "no"
    return texts


def _neighbours(scene: BusyScene) -> dict[str, str]:
    texts = {}
    for thing in scene.things:
        for direction in DIRECTIONS:
            nearest = find_nearest(scene, thing, direction)
            if nearest is not None:
                texts[f"which object is {direction} the {_noun(thing)}?"] = _noun(nearest)
    return texts


def _existences(scene: BusyScene) -> dict[str, str]:
    here = {(t.colour, t.shape) for t in scene.things}
    texts = {}
    for colour in {t.colour: None for t in scene.things}:
        for shape in {t.shape: None for t in scene.things}:
            article = "an" if colour == "orange" else "a"
            answer = "yes" if (colour, shape) in here else "no"
            texts[f"is there {article} {colour} {shape}?"] = answer
    return texts


def _numbers(scene: BusyScene) -> dict[str, str]:
    return {f"what number is on the {s.colour} sign?": str(s.number) for s in scene.signs}


def _dots(scene: BusyScene) -> dict[str, str]:
    return {f"what colour is the dot on the {_noun(t)}?": t.dot for t in scene.things if t.dot}


KINDS: dict[str, Callable[[BusyScene], dict[str, str]]] = {
    "colour": _colours,
    "shape": _shapes,
    "size": _sizes,
    "count": _counts,
    "relation": _relations,
    "neighbour": _neighbours,
    "exists": _existences,
    "sign": _numbers,
    "dot": _dots,
    "side": _sides,
}


def find_nearest(scene: BusyScene, thing: Thing, direction: str) -> Thing | None:
    """The nearest object in a direction from a thing; None where that is not clear.

    An object lies in a direction if it is at least as far along it as across. One that is nearly
    so, and not clearly farther away than the nearest, makes it unclear.
    """
    inside, doubtful = [], []
    for other in scene.things:
        along, across = _leads(thing, other, direction)
        if along <= 0:
            continue
        far = float(np.hypot(along, across))
        if across <= 0.9 * along:
            inside.append((far, other))
        elif across <= 1.3 * along:
            doubtful.append(far)
    if not inside:
        return None
    inside.sort(key=lambda pair: pair[0])
    rivals = doubtful + [far for far, _ in inside[1:]]
    nearest, other = inside[0]
    return other if all(far >= nearest + _NEARER for far in rivals) else None


def _leads(start: Thing, end: Thing, direction: str) -> tuple[float, float]:
    """How far `end` lies from `start` along a direction and across it, pixels."""
    dx = end.x - start.x
    dy = end.y - start.y
    along = {"left of": -dx, "right of": dx, "above": -dy, "below": dy}[direction]
    return along, abs(dy if direction in ("left of", "right of") else dx)


def _noun(thing: Thing) -> str:
    return f"{thing.colour} {thing.shape}"


def _number(scene: BusyScene, **wanted: str) -> int:
    return sum(all(getattr(t, k) == v for k, v in wanted.items()) for t in scene.things)


def _is_only(scene: BusyScene, **wanted: str) -> bool:
    return _number(scene, **wanted) == 1
