"""Methods of a model's modules, answered otherwise during a pass of one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any, TypeAlias

Answers: TypeAlias = list[tuple[int, Callable[..., Any]]]
"""Of one method of a module: threads, and what answers their calls."""
# by id of the module and name; and what the module itself had there
_answers: dict[tuple[int, str], tuple[Answers, Any]] = {}
_changing = Lock()


@contextmanager
def answering(modules: Sequence[Any], name: str, answer: Callable[..., Any]) -> Iterator[None]:
    """In the block, this thread's calls of a method of modules are `answer(module, ...)`."""
    entry = get_ident(), answer
    with _changing:
        for module in modules:
            own = getattr(module, name)  # a module without it leaves nothing behind
            answers, _ = _answers.setdefault((id(module), name), ([], vars(module).get(name)))
            if not answers:
                setattr(module, name, partial(_call, module, own, answers))
            answers.append(entry)
    try:
        yield
    finally:
        with _changing:
            for module in modules:
                answers, before = _answers[id(module), name]
                answers.remove(entry)
                if answers:
                    continue
                del _answers[id(module), name]
                vars(module).pop(name, None)
                if before is not None:
                    setattr(module, name, before)


def _call(module: Any, own: Any, answers: Answers, *args: Any, **options: Any) -> Any:
    for thread, answer in reversed(tuple(answers)):
        if thread == get_ident():
            return answer(module, *args, **options)
    return own(*args, **options)
