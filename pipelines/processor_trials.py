"""Whether a user's processor remembers earlier calls, found out by calls of a copy.

Each answers "prefix" if nothing was remembered, or the reason why it is refused. What is kept where
`mmaccel.pipelines.trial` does not look is found only if equal calls answer differently. A few calls
cannot show all: `mmaccel.pipelines.processor_guard` goes on looking while a policy runs.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.object_trial import ObjectTrial, is_same
from mmaccel.pipelines.trial import Trial, Unknown
from mmaccel.pipelines.watch import PLAIN


def try_function(function: types.FunctionType, ids: Tensor, scores: Tensor) -> str:
    """Equal calls of a copy of a function whose closure and defaults are plain."""
    kept = [cell.cell_contents for cell in function.__closure__ or ()]
    kept += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    name = f"a function ({function.__name__})"
    if vars(function) or not all(isinstance(item, (*PLAIN, type, Tensor)) for item in kept):
        return f"{name}, whose closure may remember earlier calls"
    try:
        trial = Trial(function)
    except Unknown as error:
        return f"{name}, whose {error} may remember earlier calls"
    return _judge(name, trial, [ids, ids], scores)


def try_allowed(function: Any, ids: Tensor) -> str:
    """Calls of a copy of a `prefix_allowed_tokens_fn`: two equal ones, and one with more tokens.

    That it raises counts for nothing: it may know what cannot stand there. What is real is raised
    where it is real.
    """
    name = f"a prefix_allowed_tokens_fn ({getattr(function, '__name__', type(function).__name__)})"
    try:
        trial = Trial(function)
    except Unknown as error:
        return f"{name}, whose {error} may remember earlier calls"
    answers: list[Any] = []
    with trial.undone():
        for prefix in (ids[0], ids[0], torch.cat([ids[0], ids[0, -1:]])):
            try:
                answers.append(trial.copy(0, prefix.clone()))
            except Exception as error:
                answers.append(type(error))
    if trial.has_changed:
        return f"{name}, which remembers earlier calls"
    if not is_same(*answers[:2]):
        return f"{name}, which answers the same question differently"
    return "prefix"


def try_object(processor: Any, ids: Tensor, scores: Tensor) -> str:
    """Equal calls of a copy, and one with a longer prefix."""
    name = f"a {type(processor).__name__}"
    try:
        trial = ObjectTrial(processor)
    except Unknown as error:
        return f"{name}, whose {error} may remember earlier calls"
    return _judge(name, trial, [ids, ids, torch.cat([ids, ids[:, -1:]], 1)], scores)


def _judge(name: str, trial: Trial | ObjectTrial, prefixes: list[Tensor], scores: Tensor) -> str:
    """Calls with `prefixes` `[B, ...]`, the first two equal, and with one row in all places."""
    rows, asked = (0, -1), list(prefixes)
    asked += [prefixes[0][row].repeat(len(scores), 1) for row in rows]
    try:
        with trial.undone():
            answers = [trial.copy(prefix.clone(), scores.clone()) for prefix in asked]
    except Exception as error:  # the reason says so; transformers' own loop raises it if it is real
        return f"{name}, which raised {type(error).__name__} when tried"
    if trial.has_changed:
        return f"{name}, which remembers earlier calls"
    if not is_same(*answers[:2]):
        return f"{name}, which answers the same question differently"
    if any(not is_same(answers[0][row], found[row]) for row, found in zip(rows, answers[-2:])):
        return f"{name}, which looks at other rows than its own"
    return "prefix"
