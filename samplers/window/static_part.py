"""A part of a run whose tensors outlive a step; captured steps find them where they were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor


class StaticPart:
    """Base of the parts of a run.

    Attributes:
        static: names of the attributes that are such tensors; some may be None in a run.
    """

    static: ClassVar[tuple[str, ...]] = ()

    def static_inputs(self) -> dict[str, Tensor]:
        """These tensors by name, with the values that the run begins with."""
        found = {name: getattr(self, name) for name in self.static}
        return {name: value for name, value in found.items() if value is not None}

    def use_static(self, inputs: Mapping[str, Tensor]) -> None:
        """Go on with other tensors of the same values, `static_inputs` by name."""
        for name, value in inputs.items():
            assert name in self.static, name
            setattr(self, name, value)
