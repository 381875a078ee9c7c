"""Short names of policies and reducers, and options that they lack."""

from __future__ import annotations

from functools import partial

from mmaccel.catalog import make, make_policy
from tests.messages.case import Refused

CASES = (
    *(
        Refused(
            f"the coupling that {name} presets",
            partial(make_policy, name, coupling="maximal"),
            says=("window, drafts", "'coupling'"),
        )
        for name in ("sjd", "mc-sjd", "gumbel-sjd")
    ),
    Refused(
        "an option of another policy",
        lambda: make_policy("jacobi", group=3),
        says=("policy jacobi", "window, drafts, tree", "'group'"),
    ),
    Refused(
        "an unknown policy",
        lambda: make_policy("jacoby"),
        says=("one of autoregressive, jacobi", "'jacoby'"),
    ),
    Refused(
        "an unknown reducer",
        lambda: make("visual_tokens", "dart2"),
        says=("one of downsample, downsample-pixels, pixel-prune, random", "'dart2'"),
    ),
    Refused(
        "an option of another reducer",
        lambda: make("visual_tokens", "dart", keep=0.5, depth=2),
        says=("dart", "keep, n_keep", "'depth'"),
    ),
)
