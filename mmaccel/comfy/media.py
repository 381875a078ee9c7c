"""What the speech and the video nodes share: loading a model with its codec, and running it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmaccel.catalog import find_policy
from mmaccel.comfy.kept_models import KeptModels, state_of
from mmaccel.comfy.open_model import AUTO, CUDA_GRAPHS, check_where, place_widgets
from mmaccel.comfy.policies import NamedPolicy, default_policy
from mmaccel.comfy.record import tell_run
from mmaccel.comfy.request import SEEDS
from mmaccel.comfy.table import PREFIX, Host, Made, NodeSpec, Output, Widget
from mmaccel.pipelines.loading.sources import content_files, find_model, is_hub_id
from mmaccel.pipelines.media import RunProgress
from mmaccel.pipelines.runner.engine import UseGraphs
from mmaccel.results import Stats

_REPORT = 0.1  # seconds between two reports of passes at least


@dataclass(frozen=True, eq=False)
class OpenMedia:
    """A loaded model with its codec.

    Attributes:
        name: as it was asked for.
        dtype: of the token model.
        pipe: a `TextToSpeech` or an `ImageToVideo`.
    """

    name: str
    dtype: str
    pipe: Any


def load_node(
    id: str, title: str, summary: str, *, model: str, codec: str, part: str, output: Output,
    pipeline: Any, folder: str, extra: Sequence[Widget] = (),
) -> NodeSpec:  # fmt: skip
    """The node that loads a model with its codec.

    Args:
        id, title, summary, folder: of the node; `PREFIX` and its words are added to the first two.
        model: id of the hub that a new node shows.
        codec: tooltip of the codec.
        part: what the dtype is of.
        output: the socket for the loaded model.
        pipeline: class whose `from_pretrained` loads it.
        extra: widgets of this pipeline alone, which are arguments of `from_pretrained`.
    """
    kept: KeptModels[OpenMedia] = KeptModels()

    def load(
        host: Host,
        *,
        model: str,
        codec: str,
        device: str,
        dtype: str,
        cuda_graphs: UseGraphs,
        **own: Any,
    ) -> Made:
        place = host.device() if device == AUTO else device
        files = _files(model, codec)
        key = (model, codec, place, dtype, *own.items(), cuda_graphs, state_of(files))

        def open_model() -> OpenMedia:
            pipe = pipeline.from_pretrained(
                model, codec=codec or None, device=place, dtype=getattr(torch, dtype),
                cuda_graphs=cuda_graphs, **own,
            )  # fmt: skip
            return OpenMedia(model, dtype, pipe)

        return Made((kept.find(key, host, place, files, open_model),))

    note = "A folder, or an id of the Hugging Face hub such as owner/name, which is downloaded."
    return NodeSpec(
        id=f"{PREFIX}{id}",
        title=f"MMAccel {title}",
        summary=summary,
        inputs=(
            Widget("model", "path", model, note),
            Widget("codec", "path", "", codec),
            *place_widgets(part),
            *extra,
            CUDA_GRAPHS,
        ),
        outputs=(output,),
        run=load,
        check=check_load,
        fingerprint=files_state,
        folder=folder,
    )


def check_load(
    *, model: str, codec: str, device: str, dtype: str, cuda_graphs: UseGraphs, **others: Any
) -> None:
    """Check what can be checked before anything is loaded.

    Raises:
        OptionError: no such folder or device.
        MissingBackendError: CUDA graphs on another device.
    """
    if not is_hub_id(model):
        find_model(model, {})
    if codec and not is_hub_id(codec):
        find_model(codec, {}, "codec")
    check_where(device, dtype, cuda_graphs)


def files_state(*, model: str, codec: str, **others: Any) -> str:
    """A text that changes when the files of a model change; empty where they are on the hub."""
    is_local = all(Path(name).exists() for name in (model, codec) if name)
    return state_of(_files(model, codec)) if is_local else ""


def _files(model: str, codec: str) -> list[Path]:
    """The files of the model, and of a codec that was named; a default codec is on the hub."""
    files = content_files(find_model(model, {}))
    return [*files, *(content_files(find_model(codec, {}, "codec")) if codec else [])]


def seed_widget(note: str) -> Widget:
    """The seed; `note` says what it is the seed of."""
    note += " A browser counts exactly up to 9007199254740992; larger ones come out rounded."
    return Widget("seed", "int", 0, note, 0, SEEDS - 1, 1, is_seed=True)


@dataclass(frozen=True)
class MediaRecord:
    """A finished run; as text, a table and a line for each payload."""

    model: OpenMedia
    chosen: NamedPolicy
    stats: Stats
    lines: tuple[str, ...]

    def __str__(self) -> str:
        """The text."""
        return tell_run(self.model, self.chosen, self.stats, self.lines)


def generate(
    host: Host, model: OpenMedia, policy: NamedPolicy | None, inputs: Any, rows: int,
    line: Callable[[Any], str], **options: Any,
) -> tuple[Any, MediaRecord]:  # fmt: skip
    """Run a pipeline with interrupts and progress.

    Args:
        host: is asked for interrupts before the first pass and after each pass and payload.
        model: what runs.
        policy: how to decode; None is an exact policy.
        inputs: the pipeline's first argument.
        rows: payloads that it makes.
        line: describes a finished payload.
        **options: further arguments of the pipeline.

    Returns:
        What the pipeline returned, and its record.

    Raises:
        OptionError: a policy of another kind, or inputs that the model does not take.
    """
    chosen = policy or default_policy(model.pipe.model)
    find_policy(chosen.name, "window")
    watch, lines = Watch(host, rows), {}

    def finish(payload: Any) -> None:
        lines[payload.index] = line(payload)
        watch.finish(payload.index)

    host.check_interrupt()
    made = model.pipe(inputs, policy=chosen.policy, deliver=finish, on_step=watch, **options)
    own = tuple(lines[index] for index in sorted(lines))
    return made, MediaRecord(model, chosen, made.stats, own)


class Watch:
    """An `on_step` that asks the host for interrupts and reports progress; it changes nothing.

    Args:
        host: what it raises ends the run.
        rows: payloads of the run.
    """

    def __init__(self, host: Host, rows: int) -> None:
        self._host, self._run = host, RunProgress(rows)
        self._reported, self._last = time.monotonic(), -1

    def finish(self, index: int) -> None:
        """A payload is finished."""
        self._host.check_interrupt()
        self._run.finish(index)
        self._report()

    def __call__(self, progress: Any) -> None:
        """See `mmaccel.results.OnStep`."""
        self._host.check_interrupt()
        self._run.update(progress)
        if time.monotonic() - self._reported >= _REPORT:
            self._report()
            self._reported = time.monotonic()

    def _report(self) -> None:
        """Report, unless nothing has changed since the last report."""
        if self._run.tokens != self._last:
            self._last = self._run.tokens
            self._host.report(self._last, self._run.total, None)
