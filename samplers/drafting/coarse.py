"""Sources of coarse drafts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmaccel.checks import within
from mmaccel.contracts import Layout
from mmaccel.errors import OptionError
from mmaccel.samplers.drafting.coarse_drafter import CoarseDrafter, OpenedCoarse
from mmaccel.samplers.drafting.coarse_model import (
    FOLDER,
    CoarseConfig,
    describe_coarse,
    find_coarse,
    load_coarse,
)
from mmaccel.samplers.drafting.contract import Drafter, DraftSource, OpenRun
from mmaccel.samplers.drafting.copies import PreviousFrame
from mmaccel.samplers.drafting.memory.suffix import Suffix
from mmaccel.samplers.drafting.neighbour import Neighbour
from mmaccel.samplers.drafting.ngram import NGram
from mmaccel.samplers.drafting.opened import open_once
from mmaccel.samplers.drafting.states import StateModel


@dataclass(frozen=True)
class _OfModel(DraftSource):
    is_capturable = True
    has_branches = True
    has_children = True
    corrects = True

    draws_trees = True


@dataclass(frozen=True)
class Coarse(_OfModel):
    """A coarse model in a folder, made with `python -m scripts.training coarse`: between two passes
    a small network corrects the drafts whose left side has changed, so that a wrong guess spoils
    less behind it. After the parareal method (J.-L. Lions, Y. Maday, G. Turinici, 2001).

    Args:
        folder: holds `coarse.json` and `coarse.safetensors`.
        candidates: how many of a slot's stale scores are corrected.
        rounds: parallel rounds that draft a window; None: until no draft changes, as in a sweep.

    Loses: in narrow windows, where passes are cheap, under other temperatures or prompts than in
    training, and on text.
    Figures: `scenes`, window 32: 4.5 tokens a pass become 6.2; a sweep takes 18 to 28 % of a pass
    on a CPU.
    """

    folder: str
    candidates: int = within(16, 1, hint="16 suits most models")
    rounds: int | None = within(None, 1, hint="4 make about the drafts of a sweep")

    reads_scores = True
    name = "coarse"

    def open(self, run: OpenRun) -> Drafter:
        model = run.model
        if not isinstance(model, StateModel):
            raise OptionError(
                f"drafts: expected a model that hands out its hidden states for {self!r}, "
                f"received a {type(model).__name__}; use drafts='neighbour'"
            )
        opened = open_once(
            self,
            model,
            Path(self.folder) / FOLDER.weights,
            lambda: OpenedCoarse(
                load_coarse(self.folder, model.output_matrix()), self.candidates, self.rounds
            ),
        )
        layout = run.prompt.layout
        if layout is not None:
            _check_grid(opened.config, layout, self.folder)
        return CoarseDrafter.begin(self, run, opened)


@dataclass(frozen=True)
class ShippedCoarse(_OfModel):
    """The coarse model in the model's own folder; `Neighbour`, with a remark, where it has none."""

    name = "coarse"

    def open(self, run: OpenRun) -> Drafter:
        source = shipped_source(run.model)
        if source is not None:
            return source.open(run)
        note = "drafts='coarse': the model has no coarse model; drafts='neighbour' instead"
        return Drafter(Neighbour(), note=note)


@dataclass(frozen=True)
class Auto(ShippedCoarse):
    """Of text under a bitwise policy `Suffix`, or `NGram` where steps are captured; else the coarse
    model in the model's own folder where it has one that fits, `PreviousFrame` in a clip, and
    `Neighbour` everywhere else.
    """

    name = "auto"

    def open(self, run: OpenRun) -> Drafter:
        is_text = run.model.is_text and run.prompt.layout is None
        if is_text and run.policy.freezes_noise and run.policy.tree is None:
            return (NGram() if run.runner.is_static else Suffix()).open(run)
        other = PreviousFrame() if is_clip(run) else Neighbour()
        source = shipped_source(run.model)
        if source is None:
            return Drafter(other)
        try:
            return source.open(run)
        except OptionError as error:
            return Drafter(other, note=f"drafts='auto': no coarse drafts, as {error}")


def is_clip(run: OpenRun) -> bool:
    layout = run.prompt.layout
    if layout is None or not 0 < layout.columns < layout.frame:
        return False
    return run.length + run.prompt.n_shown > layout.frame


def shipped_source(model: object) -> Coarse | None:
    """The coarse model in a token model's own folder; None without one."""
    if not isinstance(model, StateModel) or model.coarse is None:
        return None
    return Coarse(str(model.coarse))


def coarse_facts(policy: object, model: object) -> dict[str, str]:
    """The SHA-256 of the coarse model on which tokens depend (not bitwise ones), as "coarse"."""
    source = getattr(policy, "drafts", None)
    if getattr(policy, "exactness", None) == "bitwise":
        return {}
    if source in (Auto.name, ShippedCoarse.name) or isinstance(source, ShippedCoarse):
        source = shipped_source(model)
    return (
        {"coarse": describe_coarse(source.folder)["sha256"]} if isinstance(source, Coarse) else {}
    )


def use_folder(model: object, folder: Path) -> None:
    """Let a `StateModel` draft with the coarse model in the folder that it was loaded from."""
    if isinstance(model, StateModel):
        model.coarse = find_coarse(folder if folder.is_dir() else folder.parent)


def _check_grid(config: CoarseConfig, layout: Layout, folder: str) -> None:
    made_for = (config.columns, config.frame)
    grid = (layout.columns, layout.frame)
    if config.columns and made_for != grid:
        raise OptionError(
            f"drafts: expected a coarse model of {grid[0]} columns and {grid[1]} slots a frame, "
            f"received one of {made_for[0]} and {made_for[1]} in {folder}; make one for this "
            "size, or use drafts='neighbour'"
        )
