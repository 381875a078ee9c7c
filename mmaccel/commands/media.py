"""Flags that `generate`, `speak`, `animate` and `answer` share.

A command is a dataclass of its flags; its job checks them, loads the model, decodes and writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from mmaccel.commands import options as shared
from mmaccel.commands.flags import Without
from mmaccel.commands.options import LayerFlags, PolicyFlags, WindowPolicyFlags
from mmaccel.options import LoadOptions, SamplingOptions


@dataclass(frozen=True, kw_only=True)
class MediaFlags:
    """Flags of every command that runs a pipeline."""

    model: str
    method: PolicyFlags
    layer: LayerFlags
    seed: int | None = None
    sampling: SamplingOptions
    load: LoadOptions
    threads: shared.Threads = None


@dataclass(frozen=True, kw_only=True)
class CodecFlags(MediaFlags):
    """Flags of the commands whose models have a codec."""

    method: WindowPolicyFlags
    sampling: Annotated[SamplingOptions, Without("guidance_scale")]
    out: shared.Out = Path("out")
