"""What `mmaccel bench --family canvas` can measure, by label."""

from __future__ import annotations

from typing import Any

from mmaccel.errors import OptionError

SETUPS: dict[str, tuple[str, dict[str, Any]]] = {  # label -> short name, options
    "stepwise": ("stepwise", {}),
    "stepwise halton": ("stepwise", {"order": "halton"}),
    "stepwise left": ("stepwise", {"order": "left"}),
    "lossless-unmask": ("lossless-unmask", {}),
    "lossless-unmask halton": ("lossless-unmask", {"order": "halton"}),
    "lossless-unmask left": ("lossless-unmask", {"order": "left"}),
    "lossless-unmask halton 16": ("lossless-unmask", {"order": "halton", "drafts": 16}),
    "entropy-bounded 0.1": ("entropy-bounded", {"gamma": 0.1}),
    "entropy-bounded 0.5": ("entropy-bounded", {"gamma": 0.5}),
    "entropy-bounded 0.5 cut": (
        "entropy-bounded",
        {"gamma": 0.5, "end_threshold": 0.9, "drop_suffix": True},
    ),
    "entropy-bounded 0.57": ("entropy-bounded", {"gamma": 0.57}),
    "entropy-bounded 0.6": ("entropy-bounded", {"gamma": 0.6}),
    "entropy-bounded 0.5 end": ("entropy-bounded", {"gamma": 0.5, "end_threshold": 0.9}),
    "entropy-bounded 1.0": ("entropy-bounded", {"gamma": 1.0}),
    "entropy-bounded 4": ("entropy-bounded", {"gamma": 4.0}),
    "entropy-bounded 16": ("entropy-bounded", {"gamma": 16.0}),
    "entropy-bounded budget 1": ("entropy-bounded", {"budget_nats": 1.0}),
    "threshold 0.9": ("confident-parallel", {"threshold": 0.9}),
    "threshold 0.7": ("confident-parallel", {"threshold": 0.7}),
    "frechet 0.5": ("confident-parallel", {"rule": "frechet", "factor": 0.5}),
    "kl-stable": ("kl-stable", {}),
    "local-leap": ("local-leap", {}),
    "revised-parallel": ("revised-parallel", {}),
    "maskgit 12": ("masked-parallel", {"steps": 12}),
    "halton 12": ("masked-parallel", {"order": "halton", "choose": "first", "choice": 0.0}),
    # by window, on the next-token model of the same images, words and image tokens
    "autoregressive": ("autoregressive", {}),
    "jacobi": ("jacobi", {}),
    "mc-sjd": ("mc-sjd", {}),
}


def pick_setups(labels: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The setups of a list with commas, or "all".

    Raises:
        OptionError: one there is not.
    """
    wanted = [text.strip() for text in labels.split(",") if text.strip()]
    wanted = list(SETUPS) if labels == "all" else wanted
    unknown = [label for label in wanted if label not in SETUPS]
    if unknown or not wanted:
        raise OptionError(
            f"--policies: expected labels out of {', '.join(SETUPS)}, received "
            f"{', '.join(unknown) or 'none'}; leave it out for all"
        )
    return {label: SETUPS[label] for label in wanted}
