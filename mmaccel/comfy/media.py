"""What the speech and video nodes share: loading a model with its codec, and running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmaccel.catalog import find_policy
from mmaccel.comfy.load_model import LoadedModel, check_engine, describe_files, load_pipeline
from mmaccel.comfy.policies import NamedPolicy, default_policy
from mmaccel.comfy.progress import MediaProgress
from mmaccel.comfy.stats import RunRecord
from mmaccel.comfy.table import PREFIX, Host, NodeResult, NodeSpec, Output, Widget
from mmaccel.comfy.widgets import CUDA_GRAPHS, FUSED, device_widgets
from mmaccel.pipelines.loading.hub import is_hub_id
from mmaccel.pipelines.loading.sources import content_files, find_model
from mmaccel.pipelines.runner.engine import UseGraphs


def load_node(
    id: str, title: str, summary: str, *, model: str, codec: str, part: str, output: Output,
    pipeline: Any, folder: str, extra: Sequence[Widget] = (),
) -> NodeSpec:  # fmt: skip
    """The node that loads a model with its codec.

    Args:
        id, title, summary, folder: of the node; `PREFIX` and its words are added to the first two.
        model: the hub id that a new node shows.
        codec: tooltip of the codec.
        part: the part of the model that the dtype applies to.
        output: the socket for the loaded model.
        pipeline: class whose `from_pretrained` loads it.
        extra: widgets for further arguments of `from_pretrained`.
    """

    def load(host: Host, *, model: str, codec: str, **options: Any) -> NodeResult:
        files = _files(model, codec)
        return load_pipeline(host, pipeline, files, model=model, codec=codec or None, **options)

    note = "A folder, or an id of the Hugging Face hub such as owner/name, which is downloaded."
    return NodeSpec(
        id=f"{PREFIX}{id}",
        title=f"MMAccel {title}",
        summary=summary,
        inputs=(
            Widget("model", "path", model, note),
            Widget("codec", "path", "", codec),
            *device_widgets(part),
            *extra,
            CUDA_GRAPHS,
            FUSED,
        ),
        outputs=(output,),
        run=load,
        check=check_load,
        fingerprint=describe_model_files,
        folder=folder,
    )


def check_load(
    *, model: str, codec: str, device: str, dtype: str, cuda_graphs: UseGraphs, **others: Any
) -> None:
    """Check what can be checked before anything is loaded.

    Raises:
        OptionError: no such folder or device.
        MissingBackendError: CUDA graphs on a CPU.
    """
    if not is_hub_id(model):
        find_model(model, {})
    if codec and not is_hub_id(codec):
        find_model(codec, {}, "codec")
    check_engine(device, dtype, cuda_graphs)


def describe_model_files(*, model: str, codec: str, **others: Any) -> str:
    """A text that changes when the files of a model change; empty where they are on the hub."""
    is_local = all(Path(name).exists() for name in (model, codec) if name)
    return describe_files(_files(model, codec)) if is_local else ""


def _files(model: str, codec: str) -> list[Path]:
    """The files of the model, and of a codec that is named; a default codec is on the hub."""
    files = content_files(find_model(model, {}))
    return [*files, *(content_files(find_model(codec, {}, "codec")) if codec else [])]


def generate(
    host: Host, model: LoadedModel, policy: NamedPolicy | None, inputs: Any, rows: int,
    line: Callable[[Any], str], **options: Any,
) -> tuple[Any, RunRecord]:  # fmt: skip
    """Run a pipeline with interrupts and progress.

    Args:
        host: checked for interrupts before the first pass and after each pass and payload.
        model: the model.
        policy: how to decode; None is an exact policy.
        inputs: first argument of the pipeline.
        rows: payloads (utterances or clips) of the run.
        line: describes a finished payload.
        **options: further arguments of the pipeline.

    Returns:
        What the pipeline returned, and the record of the run.

    Raises:
        OptionError: a policy of another kind, or inputs that the model does not take.
    """
    chosen = policy or default_policy(model.pipe.model)
    find_policy(chosen.name, "window")
    progress, lines = MediaProgress(host, rows), {}

    def finish(payload: Any) -> None:
        lines[payload.index] = line(payload)
        progress.finish(payload.index)

    host.check_interrupt()
    made = model.pipe(inputs, policy=chosen.policy, deliver=finish, on_step=progress, **options)
    return made, RunRecord(model, chosen, made.stats, [lines[index] for index in sorted(lines)])
