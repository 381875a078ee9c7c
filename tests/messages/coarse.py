"""Folders that are no coarse models of the model that opens them: one line before a pass."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mmaccel import Jacobi
from mmaccel.errors import OptionError
from tests.exactness.bitwise_runs import run
from tests.fixtures.coarse import StateLanguage, strong_coarse
from tests.fixtures.spoiled import Spoil
from tests.messages.case import Refused

CONFIG = "coarse.json"


def edit_config(**changes: Any) -> Spoil:
    def edit(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        content["config"] |= changes
        (folder / CONFIG).write_text(json.dumps(content))

    return edit


def of_another_model(folder: Path) -> None:
    strong_coarse(torch.eye(5) * 2, folder)


BAD: dict[str, tuple[Spoil, type[Exception], tuple[str, ...]]] = {
    "another vocabulary": (edit_config(vocab_size=6), OptionError, ("5 tokens and states of 5",)),
    "another model": (of_another_model, OptionError, ("received one of another model",)),
}


def _open(spoil: Spoil) -> Any:
    """A run with a coarse model whose folder was spoiled."""

    def call() -> Any:
        model = StateLanguage(5, depth=6)
        with TemporaryDirectory() as folder:
            source = strong_coarse(torch.eye(5), Path(folder))
            spoil(Path(folder))
            try:
                return run(Jacobi(6, source), {}, model=model)
            finally:
                assert model.passes == 0

    return call


CASES = tuple(
    Refused(name, _open(spoil), says=says, error=error)
    for name, (spoil, error, says) in BAD.items()
)
