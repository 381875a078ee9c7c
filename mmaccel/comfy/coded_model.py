"""Models that come with a codec, as nodes load them: what is refused before, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmaccel.comfy.kept_models import state_of
from mmaccel.comfy.open_model import check_where
from mmaccel.pipelines.engine import UseGraphs
from mmaccel.pipelines.model_folder import content_files
from mmaccel.pipelines.model_source import find_model, is_hub_id


def check_coded(
    *, model: str, codec: str, device: str, dtype: str, cuda_graphs: UseGraphs, **others: Any
) -> None:
    """Refuse what can be seen to be wrong before anything is loaded.

    Raises:
        OptionError: no such folder or device.
        MissingBackendError: CUDA graphs on another device.
    """
    if not is_hub_id(model):
        find_model(model, {})
    if codec and not is_hub_id(codec):
        find_model(codec, {}, "codec")
    check_where(device, dtype, cuda_graphs)


def coded_state(*, model: str, codec: str, **others: Any) -> str:
    """What the files of a model look like from outside: another text once they are replaced."""
    is_local = all(Path(name).exists() for name in (model, codec) if name)
    return state_of(coded_files(model, codec)) if is_local else ""


def coded_files(model: str, codec: str) -> list[Path]:
    """Those of the model, and of a codec that was named; others lie in the hub's cache."""
    files = content_files(find_model(model, {}))
    return [*files, *(content_files(find_model(codec, {}, "codec")) if codec else [])]
