"""Injection: it changes one object and no other, and removing it leaves no trace."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from mmaccel.errors import AttachError
from mmaccel.pipelines.hosts.attach.patching import Injection, is_injected
from mmaccel.pipelines.hosts.original_methods import original


class _Child(nn.Linear):
    """A layer with a method of its own."""

    def scale(self, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        """Multiply."""
        return factor * x

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.scale(x))


def _negate(self: Any, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return -original(self, "scale")(x, factor)


def test_only_this_object_and_only_this_method_change() -> None:
    one, other = _Child(2, 2), _Child(2, 2)
    content, before = dict(vars(_Child)), dict(vars(one))
    injection = Injection()
    injection.add(one, {"scale": _negate})
    x = torch.tensor([1.0])
    assert one.scale(x).item() == -2.0 and one.twice(x).item() == 4.0
    assert one.scale(x, factor=5.0).item() == -5.0
    assert other.scale(x).item() == 2.0 and type(other) is _Child
    assert dict(vars(_Child)) == content
    assert type(one).scale(one, x).item() == -2.0  # looked up on the class, as generate does
    injection.remove()
    injection.remove()
    assert one.scale(x).item() == 2.0
    assert type(one) is _Child and dict(vars(one)) == before and not is_injected(one)


def test_names_and_signature_stay() -> None:
    class Inner(_Child):
        pass

    one = Inner(2, 2)
    Injection().add(one, {"scale": _negate})
    changed = type(one)
    assert isinstance(one, Inner) and changed is not Inner
    assert (changed.__name__, changed.__qualname__) == (Inner.__name__, Inner.__qualname__)
    assert changed.__module__ == Inner.__module__ and str(changed) == str(Inner)
    assert inspect.signature(one.scale) == inspect.signature(_Child(2, 2).scale)
    assert one.scale.__doc__ == "Multiply."


def test_the_class_of_injected_objects_is_always_the_same() -> None:
    """Code that torch compiled for one attach holds for the next; it is guarded by the class."""
    kinds, one, other = set(), _Child(2, 2), _Child(2, 2)
    for target, method in [(one, _negate), (other, lambda self, x: x), (one, _negate)]:
        injection = Injection()
        injection.add(target, {"scale": method})
        kinds.add(type(target))
        assert target.scale(torch.ones(1)).item() == (1.0 if target is other else -2.0)
        injection.remove()
    assert len(kinds) == 1
    injection.add(one, {"scale": _negate, "twice": _negate})
    assert type(one) not in kinds  # another set of methods


def test_a_copy_that_a_class_makes_by_itself_runs_the_original() -> None:
    class Own(_Child):
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            made = type(self).__new__(type(self))
            vars(made).update(copy.deepcopy(vars(self), memo))
            return made

    one, injection = Own(2, 2), Injection()
    injection.add(one, {"scale": _negate})
    made = copy.deepcopy(one)
    assert made.scale(torch.ones(1)).item() == 2.0 and not is_injected(made)
    Injection().add(made, {"scale": _negate})
    assert made.scale(torch.ones(1)).item() == -2.0
    injection.remove()
    assert one.scale(torch.ones(1)).item() == 2.0


def test_a_class_exchanged_meanwhile_is_reported() -> None:
    one = _Child(2, 2)
    injection = Injection()
    injection.add(one, {"scale": _negate})
    foreign = type("Foreign", (type(one),), {})
    one.__class__ = foreign
    attached = foreign.__bases__[0]
    with pytest.raises(AttachError, match="exchanged meanwhile"):
        injection.remove()
    assert type(one) is foreign
    one.__class__ = attached  # with the later change undone, `remove` works
    injection.remove()
    assert type(one) is _Child
