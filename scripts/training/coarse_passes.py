"""Passes of Jacobi runs, the data that a coarse model learns from.

Of every pass some slots are kept that were not accepted: the state that the pass computed (the
stale one), and the neighbours that it saw. The states of accepted tokens are final: the large model
computed them on the right tokens. What changes between the two is what a coarse model predicts.
Rows of one token a pass have final states alone, and are made in less than half the time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from mmaccel.errors import OptionError
from mmaccel.kernels.truncation import guide
from mmaccel.results import Generation
from mmaccel.samplers.acceptance import count_leading
from mmaccel.samplers.drafting.coarse_model import CoarseConfig
from mmaccel.samplers.drafting.states import StateModel
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.run import WindowRun
from scripts.training.coarse_targets import Target

MOST_PROMPT = 512  # last tokens of a prompt that are kept
_PER_PASS = 10  # slots of a row's pass that are kept
_VALIDATION = 20  # one row of so many is not learned from


@dataclass(frozen=True)
class RecordedJacobi(Jacobi):
    """`Jacobi` that keeps its passes, with the neighbours of `config`."""

    config: CoarseConfig | None = None
    runs: list[dict[str, Tensor]] = field(default_factory=list, repr=False, compare=False)

    def decode(self, run: WindowRun) -> Generation:
        """As `Jacobi`; every pass is kept when its tokens are accepted."""
        assert self.config is not None
        recorder = _Recorder(run, self.config)
        accept = run.accept

        def record_and_accept(tokens: Tensor, kept: Tensor) -> None:
            recorder.record(1 + count_leading(kept))
            accept(tokens, kept)

        cast(StateModel, run.model).keep_states(True)
        vars(run)["accept"] = record_and_accept
        generation = super().decode(run)
        self.runs.append(recorder.collect(generation.lengths))
        return generation


class _Recorder:
    """The passes of one run."""

    def __init__(self, run: WindowRun, config: CoarseConfig) -> None:
        self.run = run
        self.config = config
        shape = (run.prompt.batch, run.length, config.hidden_size)
        self.finals = torch.zeros(shape, dtype=torch.float16)
        self.kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def record(self, n_accepted: Tensor) -> None:
        """Keep a pass, whose drafts still stand in the token buffer."""
        run = self.run
        slots = run.rows.slots
        model: Any = run.model
        states = guide(model.last_states.float(), run.prompt.branches, run.params.guidance_scale)
        states = states.half().cpu()
        is_over = run.rows.is_over(slots).cpu()
        seen = _neighbours(self.tokens(), slots, run.rows.origin, self.config).cpu()
        at = slots.cpu()
        is_accepted = torch.arange(at.shape[1]) < n_accepted.cpu()[:, None]
        rows, index = (is_accepted & ~is_over).nonzero(as_tuple=True)
        self.finals[rows, at[rows, index]] = states[rows, index]
        order = torch.rand(at.shape).masked_fill(is_accepted | is_over, -1)
        best = order.topk(min(_PER_PASS, at.shape[1]), 1)
        rows, k = (best.values >= 0).nonzero(as_tuple=True)
        index = best.indices[rows, k]
        self.kept.append((rows, at[rows, index], states[rows, index], seen[rows, index].int()))

    def tokens(self) -> Tensor:
        """`[B, N + 1]` int64, the token buffer; V for padding, other ids, and in the last column"""
        n_ids = self.config.vocab_size
        tokens = F.pad(self.run.rows.tokens, (0, 1), value=n_ids)
        return tokens.masked_fill((tokens < 0) | (tokens > n_ids), n_ids)

    def collect(self, lengths: Tensor) -> dict[str, Tensor]:
        """The run as tensors; slots after a row's end are left out."""
        run = self.run
        lengths = lengths.cpu()
        rows, slots, states, seen = (torch.cat(parts) for parts in zip(*self.kept))
        is_inside = slots < lengths[rows]
        origin = run.rows.origin
        first = max(0, origin - MOST_PROMPT)
        tokens = self.tokens()[:, first : origin + run.length].cpu()
        return {
            "tokens": tokens.int(),
            "origin": torch.tensor([origin - first]),
            "lengths": lengths,
            "finals": self.finals,
            "rows": rows[is_inside],
            "slots": slots[is_inside],
            "states": states[is_inside],
            "seen": seen[is_inside],
        }


def _neighbours(tokens: Tensor, slots: Tensor, origin: int, config: CoarseConfig) -> Tensor:
    """Ids `[B, K, N]` int64 of the neighbours of slots `[B, K]` in tokens `[B, C]`; V where there
    is none. Slot 0 is in column `origin`, and the last column holds V.
    """
    found, exists = config.find_neighbours(slots)
    columns = torch.where(exists & (found + origin >= 0), found + origin, tokens.shape[1] - 1)
    return tokens.gather(1, columns.flatten(1)).view(columns.shape)


def collect_passes(
    target: Target,
    policy: RecordedJacobi,
    work: Path,
    rows: range,
    batch: int,
    guidance: Sequence[float | None],
) -> list[Path]:
    """Sample rows and write their passes, a file a batch; files that are there are kept. Batches
    take the guidance scales in turn.
    """
    work.mkdir(parents=True, exist_ok=True)
    assert policy.config is not None
    made_with = {
        "model": target.name,
        "policy": repr(policy),
        "config": asdict(policy.config),
        "batch": batch,
        "guidance": list(guidance),
    }
    note = work / "passes.json"
    text = json.dumps(made_with, indent=1)
    if note.exists() and note.read_text(encoding="utf-8") != text:
        raise OptionError(
            f"work: expected no passes, or some of this model with these options in {work}, "
            "received others; give another --work"
        )
    note.write_text(text, encoding="utf-8")
    files = [work / f"passes-{k:05d}.safetensors" for k in range(-(-len(rows) // batch))]
    for k, file in enumerate(files):
        if file.exists():
            continue
        policy.runs.clear()
        began = time.monotonic()
        some = rows[k * batch : (k + 1) * batch]
        target.sample(policy, some, guidance[k % len(guidance)])
        partial = file.with_suffix(".partial")
        content = {name: value.contiguous() for name, value in policy.runs[0].items()}
        save_file(content | {"seconds": torch.tensor(time.monotonic() - began)}, partial)
        partial.replace(file)
        print(f"{some.stop - rows.start} of {len(rows)} rows", flush=True)
    return files


@dataclass(frozen=True)
class Slots:
    """Some slots to learn from; K of them.

    Attributes:
        slots, distances: `[K]` int64, see `CoarseModel.base`.
        now: `[K, N]` int64, the neighbours in the end.
        seen: `[K, N]` int64, the neighbours that the pass saw; None where no pass saw the slot.
        states: `[K, D]` float32, of the pass.
        prompts: `[K, D]` float32, of slot 0.
        finals: `[K, D]` float32, of the slot on the right tokens.
        tokens: `[K]` int64, the slot's token in the end.
    """

    slots: Tensor
    distances: Tensor
    now: Tensor
    seen: Tensor | None
    states: Tensor
    prompts: Tensor
    finals: Tensor
    tokens: Tensor

    def to(self, device: str) -> Slots:
        parts = {name: value.to(device) for name, value in vars(self).items() if value is not None}
        return replace(self, **parts)


class PassData:
    """The passes in files of `collect_passes`, at least one, kept with `config`.

    Attributes:
        n_pairs: slots that were kept.
        counts: `[V]` int64, how often each token occurs.
    """

    def __init__(self, files: Sequence[Path], config: CoarseConfig) -> None:
        parts = [load_file(file) for file in files]
        n_ids = config.vocab_size
        self.config = config
        self._origin = max(int(part["origin"]) for part in parts)
        n_slots = max(part["finals"].shape[1] for part in parts)
        tokens, finals = [], []
        for part in parts:
            short = n_slots - part["finals"].shape[1]
            before = self._origin - int(part["origin"])
            tokens.append(F.pad(part["tokens"], (before, 1 + short), value=n_ids))
            finals.append(F.pad(part["finals"], (0, 0, 0, short)))
        self._tokens, self._finals = torch.cat(tokens), torch.cat(finals)
        self._lengths = torch.cat([part["lengths"] for part in parts])
        firsts = torch.tensor([0, *(len(part["lengths"]) for part in parts)]).cumsum(0)
        self._rows = torch.cat([part["rows"] + first for part, first in zip(parts, firsts)])
        self._slots, self._states, self._seen = (
            torch.cat([part[name] for part in parts]) for name in ("slots", "states", "seen")
        )
        self.seconds = sum(float(part["seconds"]) for part in parts)
        self.n_rows = len(self._tokens)
        self.n_pairs = len(self._rows)
        is_validation = self._rows % _VALIDATION == 0
        has_next = self._slots + 1 < self._lengths[self._rows]
        self._pools = {True: is_validation.nonzero()[:, 0], False: (~is_validation).nonzero()[:, 0]}
        self._before = {each: pool[has_next[pool]] for each, pool in self._pools.items()}
        self._plain = torch.ones(self.n_rows).index_fill(0, self._rows, 0).nonzero()[:, 0]
        made = self._tokens[:, self._origin :].long()
        self.counts = made.flatten().bincount(minlength=n_ids + 1)[:n_ids]

    def draw_seen(self, count: int, rng: torch.Generator, is_validation: bool = False) -> Slots:
        """Slots that a pass has seen, and what it saw."""
        pool = self._pools[is_validation]
        chosen = pool[torch.randint(len(pool), (count,), generator=rng)]
        rows = self._rows[chosen]
        slots = self._slots[chosen]
        return self._make(
            rows, slots, torch.zeros_like(slots), self._seen[chosen].long(), self._states[chosen]
        )

    def draw_unseen(self, count: int, rng: torch.Generator, is_validation: bool = False) -> Slots:
        """Slots after one that a pass has seen, at distances that are mostly small; in training
        half of them, where there are such rows, of rows of one token a pass.
        """
        pool = self._before[is_validation]
        if not len(pool):  # rows of one slot
            pool = self._pools[is_validation]
        n_rows = 0 if is_validation else len(self._plain)
        n_plain = count // 2 if n_rows else 0
        plain = self._plain[torch.randint(max(n_rows, 1), (n_plain,), generator=rng)]
        at = torch.randint(self._finals.shape[1], (n_plain,), generator=rng)
        at %= (self._lengths[plain] - 1).clamp(min=1)
        chosen = pool[torch.randint(len(pool), (count - n_plain,), generator=rng)]
        rows = torch.cat([self._rows[chosen], plain])
        slots = torch.cat([self._slots[chosen], at])
        states = torch.cat([self._states[chosen].float(), self._finals[plain, at].float()])
        distances = torch.empty(count, dtype=torch.int64).geometric_(0.2, generator=rng)
        room = self._lengths[rows] - 1 - slots  # to the row's last slot
        distances = distances.clamp(max=self.config.reach).minimum(room)
        return self._make(rows, slots + distances, distances, None, states)

    def _make(
        self, rows: Tensor, slots: Tensor, distances: Tensor, seen: Tensor | None, states: Tensor
    ) -> Slots:
        tokens = self._tokens[rows].long()
        now = _neighbours(tokens, slots[:, None], self._origin, self.config)[:, 0]
        own = tokens.gather(1, slots[:, None] + self._origin)[:, 0]
        finals, prompts = (self._finals[rows, at].float() for at in (slots, 0))
        return Slots(slots, distances, now, seen, states.float(), prompts, finals, own)
