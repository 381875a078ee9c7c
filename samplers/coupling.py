"""Couplings: how drafts behind the first rejection are redrawn; `speculative_jacobi` says what each
does.
"""

from __future__ import annotations

from typing import Literal

from mmaccel.errors import OptionError

Coupling = Literal["independent", "maximal", "gumbel"]
COUPLINGS = ("independent", "maximal", "gumbel")


def check_coupling(coupling: str) -> None:
    """Refuse an unknown coupling.

    Raises:
        OptionError: with the names that exist.
    """
    if coupling not in COUPLINGS:
        raise OptionError(
            f"coupling: expected one of {', '.join(COUPLINGS)}, received {coupling!r}; "
            "maximal keeps most"
        )
