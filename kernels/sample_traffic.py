"""Bytes that the Triton version of `sample` moves, computed from its configuration.

A row goes one of three ways where something is cut off (`sample_candidates_triton.py`), and which
one depends on its logits; a call's bytes are the sum over its rows.

Departures: what a multiprocessor reads again of a row's lists while it searches them is left out,
as they fit its own cache; so are masks, noise keys and forced tokens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from mmaccel.kernels.sample import Settings

Way = Literal["lists", "second read", "search"]
CHUNK = 4096  # these five as in the kernels, which import triton
GLANCE = 512
EDGES = 16
LEVELS = 8
PART_BYTES = 16
PAIR_BYTES = 8


class Traffic(NamedTuple):
    """Bytes of a row."""

    logits: int  # read
    written: int  # scratch and results
    read_again: int  # of what was written


def count_reads(n_values: int, settings: Settings, way: Way = "lists") -> int:
    """How often all logits of a row are read, the glance left out.

    Args:
        n_values: V.
        settings: of the call.
        way: of the row; means nothing where no token is cut off by rank or mass.
    """
    has_k, has_p = _cuts(n_values, settings)
    if not (has_k or has_p):
        return 1 + bool(settings.min_p and settings.temperature)
    if way == "lists":
        return 1
    if way == "second read":
        return 2
    of_ids = -(-(n_values - 1).bit_length() // 4)
    first = 1 if has_k and has_p else 2  # with both, there is no second read
    return first + LEVELS * has_k + (LEVELS + of_ids) * has_p + 1


def count_bytes(
    n_values: int,
    token_bytes: int,
    settings: Settings,
    way: Way = "lists",
    candidates: int = 0,
    replaced: int = 0,
) -> Traffic:
    """Bytes of one row.

    Args:
        n_values: V.
        token_bytes: of a token's logits, all branches.
        settings: of the call.
        way: of the row.
        candidates: tokens written to the row's lists, by both reads if there are two.
        replaced: of them, those of the first read where a second one replaced them.
    """
    splits = -(-n_values // CHUNK)
    reads = count_reads(n_values, settings, way) * n_values * token_bytes
    has_k, has_p = _cuts(n_values, settings)
    results = 16
    parts = splits * PART_BYTES
    peaks = splits * 4
    if not (has_k or has_p):
        above = peaks if settings.min_p and settings.temperature else 0
        return Traffic(reads, results + parts + above, parts + above)
    pairs = candidates * PAIR_BYTES
    glance = min(GLANCE, n_values) * token_bytes
    sums = 4 * EDGES + splits * (4 * EDGES + 4) + peaks  # edges, what reaches them, counts, peaks
    bounds = 24 + 8
    written = results + 2 * parts + pairs + sums + bounds
    if way == "second read" or (way == "search" and not (has_k and has_p)):
        written += splits * 4  # counts once more
    if way == "search":
        written += parts + (0 if has_k and has_p else 4)  # a state is mended
    again = 2 * (candidates - replaced) * PAIR_BYTES + 2 * parts + sums + bounds
    return Traffic(reads + glance, written, again)


def _cuts(n_values: int, settings: Settings) -> tuple[bool, bool]:
    """Whether top-k and top-p cut anything off."""
    drawn = settings.temperature != 0
    has_k = drawn and settings.top_k is not None and settings.top_k < n_values
    return has_k, drawn and settings.top_p is not None and settings.top_p < 1
