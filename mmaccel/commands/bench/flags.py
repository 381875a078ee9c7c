"""Flags of `mmaccel bench`, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from mmaccel.commands import options as shared

ALL = "all"
"""Every policy, or every setup of canvas policies."""
WINDOWS = "1,16,32,64,adaptive"
DTYPES = "float32"
_HELP_POLICIES = "short names, module:Name, or setups of canvas, with commas; or all"
_HELP_WINDOWS = f"with commas; by default {WINDOWS}"
_HELP_DTYPES = "with commas; the first, by default float32, is the baseline"
_HELP_DRAFTS = "draft sources with commas, such as neighbour,coarse, or folders of coarse models"
_HELP_GUIDANCE = "scales with commas; by default 1 and the model's own"
_HELP_TEMPERATURE = "0 is greedy; by default the model's own"


@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """What is measured, each as a list with commas; None takes what is usual."""

    policies: Annotated[str | None, typer.Option(help=_HELP_POLICIES)] = None
    windows: Annotated[str | None, typer.Option(help=_HELP_WINDOWS)] = None
    drafts: Annotated[str | None, typer.Option(help=_HELP_DRAFTS)] = None
    dtypes: Annotated[str | None, typer.Option(help=_HELP_DTYPES)] = None

    @property
    def is_empty(self) -> bool:
        """Whether none was given."""
        return (self.policies, self.windows, self.drafts, self.dtypes) == (None, None, None, None)


@dataclass(frozen=True, kw_only=True)
class ImageFlags:
    """The images that are made, and where their figures go."""

    model: Annotated[str, typer.Option(help="demo model, path or hub id")] = "scenes"
    guidance: Annotated[str | None, typer.Option(help=_HELP_GUIDANCE)] = None
    count: Annotated[int, typer.Option(help="number of fresh prompts")] = 16
    seed: Annotated[int, typer.Option(help="of the first image", callback=shared.read_seed)] = 0
    batch_size: Annotated[int, typer.Option(help="images generated together")] = 1
    temperature: Annotated[float | None, typer.Option(help=_HELP_TEMPERATURE)] = None
    decoder: shared.Decoder = None
    json_file: shared.JsonFile = None
