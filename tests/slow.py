"""Tests that are slow by what they take: `bash scripts/test.sh` leaves them out, `--all` does not.

All others carry `@pytest.mark.slow` in their own file.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def find_slow(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    for item in items:
        if FIXTURES & set(getattr(item, "fixturenames", ())):
            yield item
