"""Coarse drafts: between two passes a small model sweeps the window from left to right.

Parareal (J.-L. Lions, Y. Maday, G. Turinici, "Résolution d'EDP par un schéma en temps pararéel",
C. R. Acad. Sci. 332, 2001) with tokens for time. With the noise fixed, the token of slot j is y_j =
argmax_v (log p_j(v | y_<j) + g_j(v)). A pass evaluates all slots of the window on a guess; its
scores are stale where the guess on their left has changed since. A coarse model C, cheap enough to
run slot after slot, says what that change does:

    seen slot:    argmax of stale score + C's scores on the tokens now - C's scores on those seen
    unseen slot:  argmax of gate * scores of the last slot seen + C's scores on the tokens now + g_j

Only drafts change. Policies that are bitwise keep their tokens; those that are exact in
distribution record the distribution that the corrected scores describe (`redraft`).

Departures: C corrects the large model's last hidden state instead of its scores, sees the stale
state of the slot, and is trained for that, so that the correction has no weight alpha; only the
best `candidates` of the stale scores are corrected.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.checks import check_choice, check_int, show
from mmaccel.contracts import Layout
from mmaccel.errors import OptionError
from mmaccel.kernels import coarse_sweep_numpy, dispatch
from mmaccel.kernels.coarse_sweep import SweepSlots, coarse_sweep, share_of
from mmaccel.kernels.coarse_sweep_numpy import RowSweep
from mmaccel.kernels.truncation import guide
from mmaccel.results import Exactness
from mmaccel.samplers.acceptance import one_hot
from mmaccel.samplers.drafting.coarse_model import (
    WEIGHTS,
    CoarseConfig,
    CoarseModel,
    check_coarse,
    describe_coarse,
    find_coarse,
    load_coarse,
)
from mmaccel.samplers.drafting.coarse_rows import NEXT, record_rows, redraft_rows
from mmaccel.samplers.drafting.online import OnlineModel
from mmaccel.samplers.window.proposers import SOURCES, DraftSource

if TYPE_CHECKING:
    from mmaccel.samplers.window.run import WindowRun

_TABLES = 64  # of neighbours, by lengths of prompt and run
NAMES = ("auto", "coarse", "online", *SOURCES)


@runtime_checkable
class StateModel(Protocol):
    """A token model that hands out the hidden states from which it computes its logits.

    Attributes:
        keeps_states: whether passes store them.
        last_states: `[R, W, D]` of the last pass, any float dtype.
        coarse: folder of the coarse model that ships with the model, or None.
    """

    keeps_states: bool
    last_states: Tensor | None
    coarse: Path | None

    def output_matrix(self) -> Tensor:
        """`[V, D]`: a state's logits are its products with these rows, up to a bias."""


@dataclass(frozen=True)
class Coarse:
    """A draft source: a coarse model in a folder, made with `scripts/training/coarse.py`.

    Args:
        folder: holds `coarse.json` and `coarse.safetensors`.
        candidates: how many of a slot's stale scores are corrected.
    """

    folder: str
    candidates: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | Path):
            raise OptionError(
                f"Coarse: expected a folder, received {show(self.folder)}; give its path"
            )
        object.__setattr__(self, "folder", str(self.folder))
        check_int("candidates", self.candidates, 1, hint="16 suits most models")


class CoarseDrafts:
    """Drafts of one model's windows, between the passes of its runs.

    Args:
        model: C.
        candidates: how many of a slot's stale scores are corrected.
    """

    def __init__(self, model: CoarseModel | OnlineModel, candidates: int = 16) -> None:
        self.model, self.config, self.candidates = model, model.config, candidates
        self._tables: tuple[dict[tuple[int, int], Tensor], ...] = ({}, {})  # eager, captured
        with torch.no_grad():
            self.weights = model.sweep_weights()

    @torch.no_grad()
    def redraft(self, run: WindowRun, drafts: Tensor, noise: Tensor) -> Tensor:
        """The window's drafts, corrected.

        Args:
            run: after `write_drafts` of a step.
            drafts: `[B, W-1]` int64, from `write_drafts`.
            noise: frozen noise of the draft slots, `[B, W-1, V]`; zeros `[B, W-1, 1]` at
                temperature 0.

        Returns:
            `[B, W-1]` int64, which the token buffer holds now.
        """
        if self._goes_by_rows(run):
            return redraft_rows(self, run, drafts, noise, None)[0]
        found = self._slots(run, noise)
        if found is None:
            return drafts
        return self._sweep(run, found, self._tokens(run), found.ids.shape[-1])

    @torch.no_grad()
    def redraft_with_law(
        self, run: WindowRun, drafts: Tensor, p_draft: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`redraft`, and the distributions `[B, W-1, V]` from which the drafts were drawn.

        Given the slots on its left, a corrected draft is distributed as the softmax of its
        corrected scores, because the noise of a slot has no part in any slot before it.

        Args:
            run, drafts, noise: as in `redraft`.
            p_draft: `[B, W-1, V]`, the distributions from which `drafts` were drawn.
        """
        if self._goes_by_rows(run):
            corrected, law = redraft_rows(self, run, drafts, noise, p_draft)
            assert law is not None
            return corrected, law
        found = self._slots(run, noise)
        if found is None:
            return drafts, p_draft
        work, ids = self._tokens(run), found.ids[..., :-1]  # without the best of all others
        corrected = self._sweep(run, found, work, ids.shape[-1])
        now = _gather(work, found.neighbours)
        is_kept = found.is_fixed | (found.is_seen & (now == found.seen).all(-1))
        if run.params.temperature == 0:
            law = one_hot(corrected, run.vocab_size)
        else:
            hidden = self._hidden(now, found.base)
            change = (hidden - found.hidden_seen)[..., None]
            moved = (self.weights.head[ids] @ change)[..., 0] * _scale(run)  # [B, K, M]
            stale = self._stale_scores(run)
            seen = stale.scatter(2, ids, stale.gather(2, ids) + moved)
            fresh = (hidden @ self.weights.head.T + self.weights.head_bias) * _scale(run)
            fresh = fresh + share_of(found.last[:, None], found.gates[..., None])
            fresh = _mask(run, fresh)
            law = torch.where(found.is_seen[..., None], seen, fresh).softmax(-1)
        return corrected, torch.where(is_kept[..., None], p_draft, law)

    def record(self, run: WindowRun, scores: Tensor, noise: Tensor) -> None:
        """Keep what the next sweep needs of a pass.

        Args:
            run: after its forward pass, before `accept`.
            scores: `[B, W, V]`, those that `noise` is added to.
            noise: as in `redraft`, of all W slots.
        """
        if run.held(NEXT) is not None:
            record_rows(self, run, scores)
            return
        perturbed = scores + noise
        found = perturbed.topk(min(self.candidates, perturbed.shape[-1]), -1)
        self._record(run, found.values, found.indices)

    def record_law(self, run: WindowRun, scores: Tensor, noise: Tensor) -> None:
        """`record` for policies that use `redraft_with_law`.

        Candidates are the most likely tokens, whatever the noise. The last one is the best of all
        others, whose scores are not corrected.
        """
        if run.held(NEXT) is not None:
            record_rows(self, run, scores)
            return
        n = min(self.candidates, scores.shape[-1] - 1)
        likely = scores.topk(n, -1).indices
        perturbed = scores + noise
        rest = perturbed.scatter(-1, likely, float("-inf")).max(-1, keepdim=True)
        values = torch.cat([perturbed.gather(-1, likely), rest.values], -1)
        run.hold("coarse scores", scores)  # probabilities of zero would forget theirs
        self._record(run, values, torch.cat([likely, rest.indices], -1))

    def _record(self, run: WindowRun, values: Tensor, ids: Tensor) -> None:
        work, states = self._tokens(run), self.states(run)
        prompts, slots = run.held("coarse prompts"), run.buffer.slots
        if prompts is not None:
            states_0 = torch.where(slots[:, :1] == 0, states[:, 0], prompts)
        run.hold("coarse prompts", states[:, 0] if prompts is None else states_0)
        _hold_window(run, "coarse values", values)
        _hold_window(run, "coarse ids", ids)
        self.hold_pass(run, _gather(work, self._neighbours(run, slots)), states)

    def states(self, run: WindowRun) -> Tensor:
        """States `[B, W, D]` float32 of the guided logits: guidance is linear in both."""
        states = cast(StateModel, run.model).last_states
        assert states is not None
        return guide(states.detach().float(), run.prompt.branches, run.params.guidance_scale)

    def hold_pass(self, run: WindowRun, seen: Tensor, states: Tensor) -> None:
        """Keep the ids `[B, W, N]` of all neighbours and the states `[B, W, D]` of a pass."""
        slots = run.buffer.slots
        if isinstance(self.model, OnlineModel):
            self._learn(run, self.model, seen, states)
        _hold_window(run, "coarse neighbours", seen)
        _hold_window(run, "coarse states", states)
        run.hold("coarse first", slots[:, :1])
        run.hold("coarse end", slots[:, -1:])
        run.hold("coarse last", run.last_draft_scores)

    def _learn(self, run: WindowRun, model: OnlineModel, seen: Tensor, states: Tensor) -> None:
        """Show a C the slots that this pass and the last one have evaluated."""
        old_seen, old_states = run.held("coarse neighbours"), run.held("coarse states")
        first, last = run.held("coarse first"), run.held("coarse end")
        if old_seen is None or old_states is None or first is None or last is None:
            return
        slots = run.buffer.slots
        is_both = (slots <= last) & (run.buffer.n_generated > 0)[:, None] & ~run.is_over(slots)
        row, now = is_both.nonzero(as_tuple=True)
        before = (slots - first)[row, now]
        model.learn(
            old_seen[row, before], seen[row, now], old_states[row, before], states[row, now]
        )

    def _tokens(self, run: WindowRun) -> Tensor:
        """`[B, N + 1]` int64, the token buffer; V for padding and in the last column."""
        n_ids = self.config.vocab_size
        tokens = F.pad(run.buffer.tokens, (0, 1), value=n_ids)
        return tokens.masked_fill((tokens < 0) | (tokens > n_ids), n_ids)

    def _neighbours(self, run: WindowRun, slots: Tensor) -> Tensor:
        """Columns `[B, K, N]` int64 of the neighbours of slots `[B, K]` in `_tokens`."""
        return self.table(run)[slots]

    def table(self, run: WindowRun) -> Tensor:
        """Columns `[slots, N]` int64 of every slot's neighbours in `_tokens`."""
        origin, n_columns = run.buffer.origin, run.buffer.tokens.shape[1]
        tables = self._tables[run.runner.is_static]
        table = tables.get((origin, n_columns))
        if table is None:
            index = torch.arange(n_columns - origin, device=run.buffer.tokens.device)
            found, exists = self.config.find_neighbours(index)
            columns = found + origin
            table = torch.where(exists & (columns >= 0), columns, n_columns)
            if len(tables) >= _TABLES and not run.runner.is_static:
                tables.clear()  # prompts and runs of many lengths
            tables[origin, n_columns] = table  # those that captured graphs read stay
        return table

    def _goes_by_rows(self, run: WindowRun) -> bool:
        return run.is_on_host and not dispatch.takes("coarse_sweep", "cpu")

    @cached_property
    def row_sweep(self) -> RowSweep:
        """Sweeps with `weights` on a CPU."""
        return RowSweep(self.weights, self.model.slot_weights())

    def _slots(self, run: WindowRun, noise: Tensor) -> SweepSlots | None:
        """What the next sweep knows; None before the first pass and for a window of one slot."""
        values, states = run.held("coarse values"), run.held("coarse states")
        prompts = run.held("coarse prompts")
        seen, ids, first = (run.held(f"coarse {name}") for name in ("neighbours", "ids", "first"))
        slots = run.buffer.slots[:, :-1]
        if values is None or not slots.shape[1] or run.is_retry:
            return None
        assert states is not None and prompts is not None and first is not None
        assert seen is not None and ids is not None
        buffer, last = run.buffer, run.held("coarse end")  # last slot of the last pass
        assert last is not None
        is_seen = buffer.is_predicted()
        distances = (slots - last).masked_fill(is_seen, 0).clamp(min=0)
        at = slots.clamp(first, last) - first
        rows = torch.arange(len(at), device=at.device)[:, None]
        base = self.model.base(slots, distances, states[rows, at], prompts[:, None])
        seen, ids, values = seen[rows, at], ids[rows, at], values[rows, at]
        is_fixed = (buffer.n_generated == 0)[:, None] | run.is_over(slots)
        if not self.model.drafts_new_slots:
            is_fixed = is_fixed | ~is_seen
        forced = run.forced()
        if forced is not None:
            is_fixed = is_fixed | (forced >= 0)
        last_scores = run.held("coarse last")
        assert last_scores is not None
        gates = self.model.gate(distances)[..., 0] * _scale(run)
        noise = _mask(run, noise.expand(*slots.shape, last_scores.shape[1]))
        return SweepSlots(
            buffer.columns[:, :-1], self._neighbours(run, slots), is_seen, is_fixed, seen, base,
            self._hidden(seen, base), ids, values, last_scores, gates, noise,
        )  # fmt: skip

    def _stale_scores(self, run: WindowRun) -> Tensor:
        """`[B, W-1, V]`, the last pass's scores of the window's slots; meaningless for new ones."""
        scores, first = run.held("coarse scores"), run.held("coarse first")
        assert scores is not None and first is not None
        at = (run.buffer.slots[:, :-1] - first).clamp(0, scores.shape[1] - 1)
        rows = torch.arange(len(at), device=at.device)[:, None]
        return scores[rows, at]

    def _sweep(self, run: WindowRun, slots: SweepSlots, work: Tensor, n_corrected: int) -> Tensor:
        """Drafts `[B, W-1]`, written into `work` and into the token buffer."""
        kind, given = work.device.type, (self.weights, slots, work, _scale(run), n_corrected)
        if kind == "cpu" and not (run.runner.is_static or dispatch.takes("coarse_sweep", kind)):
            drafts = coarse_sweep_numpy.coarse_sweep(*given)
        else:  # a captured step has no numpy in it
            drafts = dispatch.run(coarse_sweep, *given)
        run.buffer.tokens.scatter_(1, slots.columns, drafts)
        return drafts

    def _hidden(self, neighbours: Tensor, base: Tensor) -> Tensor:
        """`CoarseModel.hidden` from the table of neighbours."""
        weights, n_ids = self.weights, self.config.vocab_size + 1
        offsets = torch.arange(neighbours.shape[-1], device=base.device) * n_ids
        flat = (neighbours + offsets).flatten()
        starts = torch.arange(0, len(flat), len(offsets), device=base.device)
        mixed = F.embedding_bag(flat, weights.table, starts, mode="sum").view(base.shape)
        first = (mixed + base).relu().flatten(0, -2)
        hidden = first + torch.addmm(weights.inner_bias, first, weights.inner).relu()
        return hidden.view(base.shape)


def check_drafts(source: object, exactness: Exactness) -> None:
    """Raise OptionError unless `source` is a draft source of window policies so exact."""
    if isinstance(source, Coarse | DraftSource):
        return
    is_bitwise = exactness == "bitwise"
    if isinstance(source, str) and source == "online" and not is_bitwise:
        raise OptionError(
            "drafts='online': expected a bitwise policy (what is learned depends on the noise, so "
            "that no distribution of the drafts is known), received one whose exactness is "
            f"{exactness}; use drafts='coarse'"
        )
    names = [name for name in NAMES if is_bitwise or name != "online"]
    check_choice("drafts", source, names, hint="auto suits most models")


def parse_source(text: str) -> str | Coarse:
    """A draft source from a text: a name, or the folder of a coarse model.

    A text that is no name counts as a folder if it is one or has a separator of paths in it.

    Raises:
        OptionError: a folder without a coarse model.
    """
    is_path = "/" in text or os.sep in text or os.path.isdir(text)
    if text in NAMES or not is_path:
        return text
    check_coarse(Path(text))
    return Coarse(text)


def first_source(source: str | Coarse | DraftSource) -> str | DraftSource:
    """The source, one of `SOURCES` or a `DraftSource`, of drafts that no coarse model can make."""
    if isinstance(source, DraftSource):
        return source
    return source if isinstance(source, str) and source in SOURCES else "neighbour"


def coarse_facts(policy: object, model: object) -> dict[str, str]:
    """The SHA-256 of the coarse model on which a policy's tokens depend, as "coarse"; else nothing.

    Bitwise policies have the same tokens with any coarse model.
    """
    source, folder = getattr(policy, "drafts", None), None
    if getattr(policy, "exactness", None) == "bitwise":
        return {}
    if isinstance(source, Coarse):
        folder = Path(source.folder)
    elif source in ("auto", "coarse") and isinstance(model, StateModel):
        folder = model.coarse
    return {} if folder is None else {"coarse": describe_coarse(folder)["sha256"]}


def use_folder(model: object, folder: Path) -> None:
    """Let a token model draft with the coarse model in the folder that it was loaded from.

    Args:
        model: the token model; nothing happens to one that is no `StateModel`.
        folder: of its checkpoint, or a file in it.
    """
    if isinstance(model, StateModel):
        model.coarse = find_coarse(folder if folder.is_dir() else folder.parent)


def open_coarse(
    source: str | Coarse | DraftSource,
    model: object,
    layout: Layout | None,
    length: int,
    is_static: bool,
) -> tuple[CoarseDrafts | None, str]:
    """The coarse drafts that a draft source names, and a remark where it asks for what is missing.

    Args:
        source: "auto" or "coarse" for those that ship with the model, "online" for those that are
            learned from passes, or a `Coarse`. Others correct nothing.
        model: the token model.
        layout: of the run's tokens, or None.
        length: tokens of a row.
        is_static: whether passes may be captured, in which nothing is learned.

    Raises:
        OptionError: a `Coarse` for a model that hands out no hidden states; a coarse model of
            another grid than the run's (not for "auto", which then drafts without it); see also
            `load_coarse`.
        UnsupportedModelError: see `load_coarse`.
    """
    states = model if isinstance(model, StateModel) else None
    if isinstance(source, Coarse):
        if states is None:
            raise OptionError(
                f"drafts: expected a model that hands out its hidden states for {source!r}, "
                f"received a {type(model).__name__}; use drafts='neighbour'"
            )
        return _open(source, states, layout), ""
    if source == "online":
        if states is None or is_static:
            why = "passes are captured" if states else "the model hands out no hidden states"
            return None, f"drafts='online': {why}; drafts='neighbour' instead"
        return _open_online(states, layout, length), ""
    if source not in ("auto", "coarse"):
        return None, ""
    if states is None or states.coarse is None:
        note = "drafts='coarse': the model has no coarse model; drafts='neighbour' instead"
        return None, note if source == "coarse" else ""
    own = Coarse(str(states.coarse))
    if source == "coarse":
        return _open(own, states, layout), ""
    try:
        return _open(own, states, layout), ""
    except OptionError as error:
        return None, f"drafts='auto': no coarse drafts, as {error}"


def _open(source: Coarse, model: StateModel, layout: Layout | None) -> CoarseDrafts:
    """Load once for each model, and again when the weights' file has changed."""
    output = model.output_matrix()
    file = Path(source.folder) / WEIGHTS
    key = (source, output.data_ptr(), output.device, file.is_file() and file.stat().st_mtime_ns)
    opened = opened_for(model)
    if key not in opened:
        for old in [key for key in opened if key[0] != "online"]:
            del opened[old]
        opened[key] = CoarseDrafts(load_coarse(source.folder, output), source.candidates)
    if layout is not None:
        _check_grid(opened[key].config, layout, source.folder)
    return opened[key]


def _open_online(model: StateModel, layout: Layout | None, length: int) -> CoarseDrafts:
    """One for each kind of tokens, which keeps what it has learned."""
    output, opened = model.output_matrix(), opened_for(model)
    grid = None if layout is None else (layout.columns, layout.frame, length > layout.frame)
    key = ("online", output.data_ptr(), output.device, grid)
    if key not in opened:
        opened[key] = CoarseDrafts(OnlineModel(output, layout, length))
    return opened[key]


def opened_for(model: object) -> dict[tuple[Any, ...], CoarseDrafts]:
    """The coarse drafts that were opened for a model; `_open` keeps the last ones."""
    opened: dict[tuple[Any, ...], CoarseDrafts] = vars(model).setdefault("_coarse_drafts", {})
    return opened


def share_opened(model: object, opened: dict[tuple[Any, ...], CoarseDrafts]) -> None:
    """Let a model use what was opened for another object over the same weights."""
    vars(model)["_coarse_drafts"] = opened


def _check_grid(config: CoarseConfig, layout: Layout, folder: str) -> None:
    known, own = (config.columns, config.frame), (layout.columns, layout.frame)
    if config.columns and known != own:
        raise OptionError(
            f"drafts: expected a coarse model of {own[0]} columns and {own[1]} slots a frame, "
            f"received one of {known[0]} and {known[1]} in {folder}; make one for this size, or "
            "use drafts='neighbour'"
        )


def _hold_window(run: WindowRun, name: str, value: Tensor) -> None:
    """Hold `[B, W, ...]` with zeros up to the widest window, as a held tensor has one shape."""
    missing = run.chooser.widest - value.shape[1]
    run.hold(name, F.pad(value, (0, 0, 0, missing)) if missing else value)


def _scale(run: WindowRun) -> float:
    return 1.0 / (run.params.temperature or 1.0)


def _mask(run: WindowRun, scores: Tensor) -> Tensor:
    """Scores `[B, W-1, V]`, -inf where the layout allows no token."""
    layout = run.prompt.layout
    allowed = None if layout is None else layout.allowed(run.buffer.slots[:, :-1])
    return scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))


def _gather(work: Tensor, index: Tensor) -> Tensor:
    """`[B, K, N]`, the entries of `work` `[B, M]` at `index` `[B, K, N]`."""
    return work.gather(1, index.flatten(1)).view(index.shape)
