"""What runs report: progress while they last, tokens and statistics at the end.

Shapes: **B** rows, **L** tokens asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor

Exactness = Literal["bitwise", "distribution", "relaxed"]


EXACT_DTYPE = "float32"
"""The dtype in which `bitwise` means equal bits; in others passes of different widths round
differently."""


def exactness_in(exactness: str, dtype: str) -> str:
    """What a policy of `exactness` promises in `dtype`; outside float32 bits are up to rounding."""
    return "up to rounding" if exactness == "bitwise" and dtype != EXACT_DTYPE else exactness


@dataclass
class Stats:
    """What a run cost and what it promises.

    Attributes:
        policy: the policy's repr.
        exactness: promise of the run, after fallbacks.
        tokens: tokens made, summed over rows.
        passes: forward passes of the model after the prompt's (the whole batch is one pass).
        row_passes: passes summed over the rows that were still unfinished; equals `passes` at batch
            1.
        prefill_passes: passes over the prompt.
        draft_passes: passes of a draft model.
        accepted: `accepted[k]` counts row-passes that made exactly k + 1 tokens.
        total_variation: relaxed policies: total variation spent, summed over verified tokens; 0.0
            for exact ones.
        nats: canvas policies: bound on the divergence from one commit a pass, summed over rows; see
            `mmaccel.samplers.canvas.divergence`. 0.0 for exact ones.
        positions: canvas policies: entries that went through the model, over all rows of all
            passes.
        fed: window policies: entries that went through the model, over all rows of all passes, the
            prompt's included; those of rows that had ended, and of padding, count like others.
        seconds: wall time of the run.
        forward_seconds: the model's share of it, the prompt's pass included; on an accelerator the
            time to launch passes, not to finish them.
        pixel_seconds: time behind the run that made images, or sound, of the tokens; 0.0 where
            none were.
        branches: rows of a pass per row asked for: 2 with guidance, 1 without.
        fallbacks: reasons for everything that ran in another way than asked.
        notes: what is worth knowing of a run that went as asked, as a budget that bought nothing.
        runner: how passes were carried out: "eager" or "cuda graphs".
        runner_reason: why passes were not captured, where they were to be; or empty.
        captures: passes captured in this run; 0 with "cuda graphs" where all graphs that it
            replayed were captured by earlier ones.
        attention: "window_attention" where the layers ran that kernel, else "the model's own" with
            the reason; empty for models that have no choice.
        reference: the decoder that `exactness` speaks of, where a pipeline leaves a choice.
    """

    policy: str = ""
    exactness: Exactness = "bitwise"
    tokens: int = 0
    passes: int = 0
    row_passes: int = 0
    prefill_passes: int = 0
    draft_passes: int = 0
    accepted: list[int] = field(default_factory=list)
    total_variation: float = 0.0
    nats: float = 0.0
    positions: int = 0
    tokens_processed: int = 0
    seconds: float = 0.0
    forward_seconds: float = 0.0
    pixel_seconds: float = 0.0
    branches: int = 1
    fallbacks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    runner: str = "eager"
    runner_reason: str = ""
    captures: int = 0
    attention: str = ""
    reference: str = ""

    @property
    def tokens_per_pass(self) -> float:
        """Tokens a row gains in one forward pass, on average."""
        return self.tokens / self.row_passes if self.row_passes else 0.0

    @property
    def acceptance_by_slot(self) -> list[float]:
        """Share of a row's passes in which slot k of the window was kept, k from 0; the first one
        always is.
        """
        n_passes = sum(self.accepted)
        return [sum(self.accepted[k:]) / n_passes for k in range(len(self.accepted))]

    def to_dict(self) -> dict[str, Any]:
        """All fields, `tokens_per_pass` and `kept_by_slot`, ready for JSON."""
        derived = {"tokens_per_pass": self.tokens_per_pass, "kept_by_slot": self.acceptance_by_slot}
        return {**asdict(self), **derived}

    def __str__(self) -> str:
        """A small table."""
        passes = (
            f"{self.tokens} in {self.passes} forward passes ({self.tokens_per_pass:.2f} a pass)"
        )
        lines = [("tokens", passes), ("exactness", self.exactness)]
        if self.reference:
            lines.append(("reference", self.reference))
        if self.branches > 1:
            lines.append(("guidance", f"{self.branches} rows of a pass per row"))
        if self.draft_passes:
            lines.append(("draft model", f"{self.draft_passes} passes"))
        if self.total_variation:
            spent = self.total_variation / max(1, self.tokens)
            lines.append(("spent", f"total variation {spent:.3f} a token"))
        if self.nats:
            lines.append(("spent", f"{self.nats:.3f} nats at most"))
        if len(self.accepted) > 1 and not self.positions:  # a canvas has no first slot
            shares = " ".join(f"{100 * share:.0f}" for share in self.acceptance_by_slot[:16])
            lines.append(("kept by slot", f"{shares} %" + " …" * (len(self.accepted) > 16)))
        parts = [("model", self.forward_seconds), ("rendering", self.pixel_seconds)]
        parts.insert(1, ("sampler", self.seconds - self.forward_seconds))
        shown = ", ".join(f"{name} {value:.2f}" for name, value in parts if value)
        shown = f" ({shown})" if self.forward_seconds else ""  # not measured where we fell back
        lines.append(("seconds", f"{self.seconds + self.pixel_seconds:.2f}{shown}"))
        if self.runner != "eager" or self.runner_reason:
            because = f": {self.runner_reason}" if self.runner_reason else ""
            if self.runner == "cuda graphs":
                because = f": {self.captures} captured" if self.captures else ": captured before"
            lines.append(("runner", f"{self.runner}{because}"))
        lines += [("fell back", reason) for reason in self.fallbacks]
        lines += [("note", note) for note in self.notes]
        return "\n".join(f"{name:13}{value}" for name, value in lines)


@dataclass(frozen=True)
class Generation:
    """What a sampler returns.

    Attributes:
        tokens: `[B, L]` int64, 0 behind a row's end.
        lengths: `[B]` int64.
        passes: `[B]` int64, passes each row took part in while it was unfinished.
        stats: of the batch.
    """

    tokens: Tensor
    lengths: Tensor
    passes: Tensor
    stats: Stats


@dataclass(frozen=True)
class Progress:
    """State handed to `on_step` after every pass.

    Attributes:
        tokens: `[B, L]` int64, valid up to `lengths`; a view, to be copied if kept.
        lengths: `[B]` int64, tokens made so far.
        previous: `[B]` int64, `lengths` before this pass.
        passes: passes so far.
        rows: which row of the prompt stands in each of the B places, where there are `ContinuousBatching`;
            empty where every row has its own.
    """

    tokens: Tensor
    lengths: Tensor
    previous: Tensor
    passes: int
    rows: tuple[int, ...] = ()


OnStep = Callable[[Progress], "Tensor | None"]
"""Called after every pass. May return `[B]` int64: the number of tokens after which each row ends
(a number above the row's length lets it go on); None changes nothing. An exception from it stops
the run and reaches the caller."""
