"""Which tests are slow: `bash scripts/test.sh` leaves them out, `--all` runs them too.

A test can also carry `@pytest.mark.slow` in its own file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

# Fixtures of slow tests: a browser.
FIXTURES = {"browser"}

# Folders, files and functions of slow tests. A comment names what the fast run has instead.
SLOW = ("tests/training",)

# Sweeps: of each parametrized test in a file, or of one test, the fast run has the first case and
# every n-th after it. Choose n without a common factor with the number of policies or settings, so
# that both vary. Tokens of every method of the catalog (tests/matrix/test_window.py and bitwise
# policies in test_canvas.py) and all planted bugs are in both.
SWEEPS = {}


def find_slow(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The listed tests among the collected ones."""
    cases: Counter[str] = Counter()
    for item in items:
        function = item.nodeid.partition("[")[0]
        step = SWEEPS.get(function) or SWEEPS.get(function.partition("::")[0], 1)
        left_out = cases[function] % step != 0
        cases[function] += 1
        listed = any(f"{function}/".startswith((f"{e}/", f"{e}::")) for e in SLOW)
        if left_out or listed or FIXTURES & set(getattr(item, "fixturenames", ())):
            yield item
