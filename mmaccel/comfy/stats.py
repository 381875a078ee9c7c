"""What a run reports, and the node that turns it into text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmaccel.comfy.policies import NamedPolicy
from mmaccel.comfy.table import PREFIX, STATS, TEXT, Host, NodeResult, NodeSpec, Output, Socket
from mmaccel.pipelines.text_to_image.contact_sheet import describe_guarantee, title_of
from mmaccel.results import Stats


@dataclass(frozen=True)
class RunRecord:
    """A finished run without what it generated; `str()` is the text of the Stats node.

    Attributes:
        model: a `LoadedModel`.
        chosen: the policy.
        stats: of the whole run.
        lines: one line of text for each image, utterance or clip.
        compared: how the run compares with decoding token by token; empty without a comparison.
        negative: the negative prompt; empty without one.
    """

    model: Any
    chosen: NamedPolicy
    stats: Stats
    lines: Sequence[str]
    compared: str = ""
    negative: str = ""

    def __str__(self) -> str:
        """A table, then the lines."""
        table = {
            "policy": title_of(self.chosen.name, self.chosen.policy),
            "promise": describe_guarantee(self.stats, self.model.dtype),
            "compared": self.compared,
            "negative": self.negative,
            "model": f"{self.model.name} ({self.model.dtype} on {self.model.pipe.model.device})",
        }
        head = [f"{name:13}{value}" for name, value in table.items() if value]
        return "\n".join((*head, f"{self.stats}\n", *self.lines))


def show(host: Host, *, stats: RunRecord) -> NodeResult:
    """The record of a run as text."""
    return NodeResult((str(stats),), str(stats))


SHOW = NodeSpec(
    id=f"{PREFIX}Stats",
    title="MMAccel Stats",
    summary="Shows what a run guaranteed and what it cost: tokens, forward passes, seconds, seeds.",
    inputs=(Socket("stats", STATS, "From Generate or Compare."),),
    outputs=(Output("text", TEXT, "The same as text."),),
    run=show,
    check=lambda: None,  # a node without widgets has nothing to refuse
    is_output=True,
)
