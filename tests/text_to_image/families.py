"""Families of image models as cases: two in the fast lane, the others in the slow one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

FAST = ("janus", "imagegpt")  # guided by rows of its own loop; without prompts, at fixed positions


def each(families: Iterable[str], fast: Iterable[str] = FAST) -> list[Any]:
    """Cases of `pytest.mark.parametrize`."""
    return [
        family if family in fast else pytest.param(family, marks=pytest.mark.slow)
        for family in families
    ]
