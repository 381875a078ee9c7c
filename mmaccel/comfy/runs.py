"""Runs of pipelines: what they report, and the node that turns it into text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmaccel.comfy.loading import LoadedModel
from mmaccel.comfy.methods import NamedPolicy, choose_policy
from mmaccel.comfy.progress import MediaProgress
from mmaccel.comfy.table import PREFIX, STATS, TEXT, Host, NodeResult, NodeSpec, Output, Socket
from mmaccel.pipelines.text_to_image.contact_sheet import describe_guarantee, title_of
from mmaccel.results import Stats


@dataclass(frozen=True)
class RunRecord:
    """A finished run without what it generated; `str()` is the text of the Stats node.

    Attributes:
        model: what made it.
        chosen: the policy.
        stats: of the whole run.
        lines: one line of text for each image, utterance or clip.
        compared: how the run compares with decoding token by token; empty without a comparison.
        negative: the negative prompt; empty without one.
    """

    model: LoadedModel
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


def run_pipeline(
    host: Host,
    model: LoadedModel,
    policy: NamedPolicy | None,
    call: Callable[[Any], tuple[Any, Sequence[str]]],
) -> tuple[Any, RunRecord]:
    """Run a pipeline whose model is decoded token after token.

    Args:
        host: checked for interrupts before the first pass.
        model: what runs.
        policy: how to decode; None is an exact policy.
        call: runs the pipeline under a policy; what it made, and a line for each payload.

    Raises:
        OptionError: a policy of another kind, or inputs that the model does not take.
    """
    chosen = choose_policy(policy, "window")
    host.check_interrupt()
    made, lines = call(chosen.policy)
    return made, RunRecord(model, chosen, made.stats, lines)


class DeliveredLines:
    """A `deliver` of a pipeline: a line for each payload, in the order of the inputs.

    Args:
        progress: of the run.
        describe: a payload as a line.
    """

    def __init__(self, progress: MediaProgress, describe: Callable[[Any], str]) -> None:
        self._progress = progress
        self._describe = describe
        self._lines: dict[int, str] = {}

    def __call__(self, payload: Any) -> None:
        """A payload is finished."""
        self._lines[payload.index] = self._describe(payload)
        self._progress.finish(payload.index)

    @property
    def lines(self) -> list[str]:
        """Of all payloads so far."""
        return [self._lines[index] for index in sorted(self._lines)]


def run_media(
    host: Host,
    model: LoadedModel,
    policy: NamedPolicy | None,
    inputs: Any,
    rows: int,
    describe: Callable[[Any], str],
    **options: Any,
) -> tuple[Any, RunRecord]:
    """Run a pipeline of speech or video with interrupts and progress.

    Args:
        host: checked for interrupts before the first pass and after each pass and payload.
        model, policy: see `run_pipeline`.
        inputs: first argument of the pipeline.
        rows: payloads (utterances or clips) of the run.
        describe: a finished payload as a line.
        **options: further arguments of the pipeline.

    Returns:
        What the pipeline returned, and the record of the run.

    Raises:
        OptionError: see `run_pipeline`.
    """
    progress = MediaProgress(host, rows)
    delivered = DeliveredLines(progress, describe)

    def call(chosen: Any) -> tuple[Any, Sequence[str]]:
        made = model.pipe(inputs, policy=chosen, deliver=delivered, on_step=progress, **options)
        return made, delivered.lines

    return run_pipeline(host, model, policy, call)


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
