"""The law of canvas policies on six joints that are small enough for a table, without sampling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmaccel.evaluation.canvas_law import induced_law
from mmaccel.evaluation.exactness import total_variation
from mmaccel.evaluation.oracles import OracleDenoiser, families

_LENGTH, _TOKENS = 4, 3


def measure_toys(policies: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A dict per policy: total variation between its law and the joint, passes and nats, means over
    the joints of `families`; policies that revise, that cannot run over a model that keeps
    nothing, or that wait for an end token, which no joint has, have no row.

    Args:
        policies: label to policy.
    """
    for label, policy in policies.items():
        if not can_enumerate(policy):
            continue
        found = {
            name: (induced_law(policy, OracleDenoiser(joint), _LENGTH, _TOKENS), joint)
            for name, joint in families(_LENGTH, _TOKENS).items()
        }
        apart = {name: total_variation(law.joint, joint) for name, (law, joint) in found.items()}
        n = len(found)
        passes = sum(law.mean_passes for law, _ in found.values()) / n
        nats = sum(float((law.chance * law.nats).sum()) for law, _ in found.values()) / n
        yield {
            "model": "six joints of 4 slots, exact",
            "policy": label,
            "settings": repr(policy),
            "exactness": policy.exactness,
            "rows": n,
            "tokens": float(_LENGTH),
            "passes": passes,
            "tokens_per_pass": _LENGTH / passes,
            "positions": _LENGTH * passes,
            "nats": nats,
            "same": None,
            "seconds": 0.0,
            "quality": {
                "total_variation": sum(apart.values()) / n,
                "worst": max(apart.values()),
                **apart,
            },
        }


def can_enumerate(policy: Any) -> bool:
    """Whether a policy's law on a model without a store can be gone through."""
    revises = type(policy).__name__ in ("RevisedParallel", "LosslessUnmask")
    has_noise = bool(getattr(policy, "choice", 0.0))
    ends = getattr(policy, "end_threshold", None) is not None or getattr(
        policy, "drop_suffix", False
    )
    return not (revises or has_noise or ends) and hasattr(policy, "decode")
