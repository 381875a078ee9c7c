"""What a run says of itself, and the node that turns it into text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmaccel.comfy.policies import NamedPolicy
from mmaccel.comfy.request import Request
from mmaccel.comfy.table import PREFIX, STATS, TEXT, Host, Made, NodeSpec, Output, Socket
from mmaccel.pipelines.text_to_image.contact_sheet import describe_guarantee, title_of
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.results import Stats


@dataclass(frozen=True)
class Record:
    """A finished run without its images.

    Attributes:
        request: what was asked.
        stats: of the whole run.
        passes: forward passes of each image.
        verdict: how it compares with token by token; empty where nobody compared.
    """

    request: Request
    stats: Stats
    passes: tuple[int, ...]
    verdict: str = ""

    @classmethod
    def of(cls, request: Request, made: ImageOutput, verdict: str = "") -> Record:
        """The record of a run."""
        return cls(request, made.stats, tuple(made.passes.tolist()), verdict)

    def __str__(self) -> str:
        """A table, then a line for each image with its own seed."""
        asked, model = self.request, self.request.model
        more = {"compared": self.verdict, "negative": asked.negative or ""}
        own = [
            f"seed {seed}: {model.pipe.length} tokens in {passes} forward passes: {caption}"
            for seed, passes, caption in zip(asked.seeds, self.passes, asked.captions, strict=True)
        ]
        return tell_run(model, asked.chosen, self.stats, own, **more)


def tell_run(model: Any, chosen: NamedPolicy, stats: Stats, own: Sequence[str], **more: str) -> str:
    """A table, then a line for everything that was made.

    Args:
        model: with its name, dtype and pipeline.
        chosen: the policy.
        stats: of the run.
        own: the lines.
        **more: rows of the table; empty ones are left out.
    """
    lines = {
        "policy": title_of(chosen.name, chosen.policy),
        "promise": describe_guarantee(stats, model.dtype),
        **{name: value for name, value in more.items() if value},
        "model": f"{model.name} ({model.dtype} on {model.pipe.model.device})",
    }
    head = "\n".join(f"{name:13}{value}" for name, value in lines.items())
    return "\n".join((head, f"{stats}\n", *own))


def show(host: Host, *, stats: Record) -> Made:
    """The record of a run as text."""
    return Made((str(stats),), str(stats))


def _nothing(**values: Any) -> None:
    """A node without widgets has nothing to refuse."""


SHOW = NodeSpec(
    id=f"{PREFIX}Stats",
    title="MMAccel Stats",
    summary="Says what a run promised and what it cost: tokens, forward passes, seconds, seeds.",
    inputs=(Socket("stats", STATS, "From Generate or Compare."),),
    outputs=(Output("text", TEXT, "The same as text."),),
    run=show,
    check=_nothing,
    is_output=True,
)
