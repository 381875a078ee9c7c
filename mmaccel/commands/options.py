"""Options that `mmaccel speak` and `mmaccel animate` share, as types of their parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmaccel.catalog import POLICIES

_WINDOW = [name for name, entry in POLICIES.items() if entry.kind == "window"]
_HELP_POLICY = f"one of {', '.join(_WINDOW)}; by default jacobi, which is exact"
_HELP_SET = "a field of the policy as name=value, as often as needed; see mmaccel models"

WindowPolicy = Annotated[str | None, typer.Option(help=_HELP_POLICY)]
SetFields = Annotated[list[str] | None, typer.Option("--set", help=_HELP_SET)]
Window = Annotated[str | None, typer.Option(help='tokens per pass, or "adaptive"')]
Out = Annotated[Path, typer.Option(help="folder for the files")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy")]
TopK = Annotated[int | None, typer.Option(help="keep the k likeliest; 0 keeps all")]
TopP = Annotated[float | None, typer.Option(help="keep this much probability")]
MinP = Annotated[float | None, typer.Option(help="least share of the likeliest")]
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16")]
CudaGraphs = Annotated[str, typer.Option(help="auto, on or off; on needs a GPU")]
