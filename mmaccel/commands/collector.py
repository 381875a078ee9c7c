"""Python's cycle collector rests while the command line imports what it needs.

Importing torch and transformers makes several hundred thousand objects that stay, and the collector
walks over them again and again: about a fifth of the time to the first token of a small model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def same_collector_after() -> Iterator[None]:
    """Whatever happens inside, the collector runs afterwards if it ran before."""
    was_enabled = gc.isenabled()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def rest_collector() -> None:
    """Collect no cycle until `wake_collector`."""
    gc.disable()


def wake_collector() -> None:
    """Collect again, but not among what stands by now: modules stay.

    Does nothing where the collector is not resting.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
