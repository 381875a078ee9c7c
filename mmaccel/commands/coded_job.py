"""What one run of `mmaccel speak` and one of `mmaccel animate` have in common: naming and keeping
what is made, with all that it was made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmaccel.batch.recipe import FILTERS
from mmaccel.outputs.machine import versions
from mmaccel.outputs.picture_files import picture_name, plainly
from mmaccel.pipelines.model_folder import content_hash
from mmaccel.results import EXACT_DTYPE, promise_in
from mmaccel.samplers.filters import Filters

_SPELLING = ("model", "policy", "policy_options")


@dataclass(kw_only=True)
class CodedJob(ABC):
    """How to make things from a token model and a codec, once it is checked, and how many are kept.

    Attributes:
        pipe: a `TextToSpeech` or an `ImageToVideo`, opened by name.
        seed: of the first.
        name: of the policy.
        policy: itself.
        options: what was given of the pipeline's own arguments.
        batch_size: how many are in the making together.
        out: folder for the files.
        model, dtype: as they were given.
        kept: files written.
    """

    pipe: Any
    seed: int
    name: str
    policy: Any
    options: dict[str, Any]
    batch_size: int
    out: Path
    model: str
    dtype: str
    kept: int = 0

    @property
    @abstractmethod
    def n_asked(self) -> int:
        """Files that are to be made."""

    @property
    @abstractmethod
    def unit(self) -> str:
        """What a file is."""

    @property
    def told(self) -> str:
        """How far it is."""
        return f"kept {self.kept} of {self.n_asked} {self.unit}s"

    def base(self, filters: Filters) -> dict[str, Any]:
        """What things of this run are made from beside seed and input, ready for JSON."""
        return {
            "model": self.model,
            "weights": content_hash(self.pipe.source),
            "codec": content_hash(self.pipe.codec),
            "dtype": self.dtype,
            "device": str(self.pipe.model.device),
            "policy": self.name,
            "policy_options": {name: plainly(v) for name, v in vars(self.policy).items()},
            **{name: vars(filters)[name] for name in FILTERS if name != "guidance_scale"},
        }

    def keep(
        self,
        title: str,
        made: Any,
        settings: Mapping[str, Any],
        source: Mapping[str, Any],
        facts: Mapping[str, Any],
        suffix: str,
        write: Callable[[Path, dict[str, Any]], None],
    ) -> None:
        """Write one thing; only the same one is overwritten.

        Args:
            title: its first words stand in the file's name.
            made: it, with its `seed`, `passes` and `total_variation`.
            settings: `base` and what else the run is made from.
            source: what it alone was made from, as the model got it.
            facts: what the JSON file tells besides.
            suffix: of the file.
            write: is given path and facts.

        Raises:
            OSError: it cannot be written; with what was kept.
        """
        recipe = {name: value for name, value in settings.items() if name not in _SPELLING}
        recipe |= {"policy": repr(self.policy), **source}
        if self.dtype != EXACT_DTYPE or self.policy.exactness != "bitwise":
            recipe["rows"] = self.batch_size
        name = picture_name(made.seed, title, self.name, recipe, suffix)
        told = {
            "seed": made.seed,
            **settings,
            "exactness": promise_in(self.policy.exactness, self.dtype),
            **facts,
            "passes": made.passes,
            "total_variation": made.total_variation,
            "versions": versions(),
        }
        try:
            write(self.out / name, told)
        except OSError as error:
            raise OSError(
                f"--out: expected room for {name} in {str(self.out)!r}, received {error.strerror}; "
                f"{self.told}; make room, and run it again"
            ) from error
        self.kept += 1
