"""What runs report: progress after every pass, tokens and statistics at the end.

Shapes: **B** rows, **L** tokens asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, cast, get_args

from torch import Tensor

Exactness = Literal["bitwise", "distribution", "relaxed"]
"""What a policy guarantees."""

RunExactness = Literal["bitwise", "up to rounding", "distribution", "relaxed"]
"""What a run guarantees, the strongest first. `up to rounding` is what is left of `bitwise` where
passes are computed in a number format in which their width changes the result, by more than the
last bits of float32; with `fused="exact"` it does not."""

EXACT_DTYPE = "float32"
"""The dtype of commands in which `bitwise` means equal bits; float64 is the other one."""


class ShortRepr:
    """A dataclass whose `repr` fits a screen: shapes, `Stats.summary`, counts of long lists."""

    def __repr__(self) -> str:
        given: Any = self
        shown = (f"{one.name}={_show(getattr(self, one.name))}" for one in fields(given))
        return f"{type(self).__name__}({', '.join(shown)})"


_MOST_SHOWN = 4  # of a list
_STRONGEST_FIRST = get_args(RunExactness)
_WIDER = 1.05  # canvases a pass from which on a run says so


def _show(value: Any) -> str:
    if isinstance(value, Stats):
        return f"<{value.summary}>"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"<{list(value.shape)} {str(value.dtype).removeprefix('torch.')}>"
    if isinstance(value, list | tuple) and len(value) > _MOST_SHOWN:
        return f"<{len(value)} of {type(value[0]).__name__}>"
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    if hasattr(value, "getbands"):  # of Pillow
        return f"<image {value.width}x{value.height}>"
    return repr(value)


def exactness_in(exactness: str, dtype: str) -> RunExactness:
    """What a policy of `exactness` guarantees in a number format, see `Stats.dtype`."""
    is_exact = dtype in (EXACT_DTYPE, "float64")
    guarantee = "up to rounding" if exactness == "bitwise" and not is_exact else exactness
    return cast(RunExactness, guarantee)


@dataclass
class BlockCounts:
    """Blocks that sparse attention did not read in a run, over all passes, layers, rows and key
    heads, and choices of no block at all, where the newest blocks were read.
    """

    left_out: int = 0
    empty: int = 0


@dataclass(frozen=True)
class StepBytes:
    """What a step of a run reads, in bytes; `weights` of the decoder and the computed rows of its
    head, once, fewer in a mixture of experts; `cache` is keys and values of all positions of all
    rows, as if no method held or read fewer.
    """

    weights: int
    cache: int

    @property
    def speed_up(self) -> float:
        """How many times as fast a step becomes at most if nothing of the cache is read."""
        return (self.weights + self.cache) / self.weights


@dataclass
class Stats:
    """What a run cost and what it guarantees.

    Attributes:
        policy: the policy's repr.
        exactness: guarantee of the run, after fallbacks, in the number format of its passes;
            "relaxed" where tokens of a pass share the rounding of quantised activations.
        tokens: generated tokens, summed over rows.
        passes: forward passes of the model after the prompt's (the whole batch is one pass).
        row_passes: passes summed over the unfinished rows; equals `passes` at batch 1. By it
            `tokens_per_pass` and a row's or image's own passes are counted.
        prefill_passes: passes over the prompt; one that gives the first tokens is among `passes`,
            too.
        accepted: `accepted[k]` counts row-passes that generated exactly k + 1 tokens.
        total_variation: of relaxed policies, spent, summed over verified tokens.
        nats: of canvas policies: bound on the divergence from one commit a pass, summed over rows;
            see `mmaccel.samplers.divergence`.
        positions, canvases: of canvas policies: entries, and canvases, that went through the model,
            in all passes, drafts and guidance branches.
        tokens_processed: of window policies: tokens that went through the model, over all rows of
            all passes, those of the prompt, of ended rows and of padding included.
        prefix_tokens: of window policies: tokens of prompts that a prefix tree held instead.
        forward_seconds: the model's share of `seconds`, the prompt's pass included; on a GPU the
            time to launch passes, not to finish them.
        pixel_seconds: time after the run to decode the tokens to images or sound.
        branches: rows of a pass per row asked for: 2 with guidance, 1 without.
        fallbacks: reasons for everything that ran otherwise than requested.
        notes: remarks on a run that ran as requested, such as a budget that had no effect.
        runner, runner_reason: "eager" or "cuda graphs", and why requested captures were not made.
        captures: passes captured in this run; 0 with "cuda graphs" if all were captured before.
        drafts: of window policies: the draft source in use, such as "coarse" or "neighbour", after
            "auto" was resolved. Of canvas policies that choose the number of drafts by measured
            cost: canvases a pass, and in how many passes.
        attention: "window_attention" if the layers ran that kernel, else "the model's own" with the
            reason; empty for models that have no choice.
        route, route_reason: the forward that ran, "fused" (of `pipelines.hosts.runner`), "compiled"
            (its passes, or some of them) or "model", the model's own, and why; or how many weights
            the fused decoder holds once more.
        reference: the decoder that `exactness` refers to, if a pipeline has several.
        dtype: number format of the forward passes, such as "float32", "bfloat16" under autocast or
            "tf32", or of quantised activations, such as "int8"; empty where the original ran.
        seed: the `seed` that repeats the run, given or drawn: one, or one per row. None where no
            random number was asked for, and where every request has a seed of its own.
    """

    policy: str = ""
    exactness: RunExactness = "bitwise"
    tokens: int = 0
    passes: int = 0
    row_passes: int = 0
    prefill_passes: int = 0
    draft_passes: int = 0
    accepted: list[int] = field(default_factory=list)
    total_variation: float = 0.0
    nats: float = 0.0
    positions: int = 0
    canvases: int = 0
    tokens_processed: int = 0
    prefix_tokens: int = 0
    seconds: float = 0.0
    forward_seconds: float = 0.0
    pixel_seconds: float = 0.0
    branches: int = 1
    fallbacks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    runner: str = "eager"
    runner_reason: str = ""
    captures: int = 0
    drafts: str = ""
    attention: str = ""
    route: str = ""
    route_reason: str = ""
    reference: str = ""
    dtype: str = ""
    seed: int | Sequence[int] | None = None

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.row_passes if self.row_passes else 0.0

    @property
    def canvases_per_pass(self) -> float:
        """Canvases that a pass computes for each of a plain pass: above 1 with drafts."""
        plain = self.row_passes * self.branches
        return self.canvases / plain if plain else 0.0

    @property
    def of_canvases(self) -> str:
        each = self.canvases_per_pass
        return f" of {each:.1f} canvases" if each >= _WIDER else ""

    @property
    def acceptance_by_slot(self) -> list[float]:
        """Share of a row's passes in which slot k of the window was accepted; k = 0 always is."""
        n_passes = sum(self.accepted)
        return [sum(self.accepted[k:]) / n_passes for k in range(len(self.accepted))]

    def use_dtype(self, dtype: str, *, same_bits: bool = False) -> None:
        """Record the number format of the passes, "" if none ran; `exactness` follows it, but where
        passes of all widths have the same bits.
        """
        self.dtype = dtype or self.dtype
        if dtype and not same_bits:
            self.exactness = exactness_in(self.exactness, dtype)

    def to_dict(self) -> dict[str, Any]:
        derived = {"tokens_per_pass": self.tokens_per_pass, "kept_by_slot": self.acceptance_by_slot}
        return {**asdict(self), **derived}

    @property
    def summary(self) -> str:
        return (
            f"{self.tokens} tokens in {self.passes} forward passes{self.of_canvases}, "
            f"{self.tokens_per_pass:.2f} tokens {self._each_pass}, {self.seconds:.2f} s"
        )

    @property
    def _each_pass(self) -> str:
        return "a pass for each row" if self.row_passes > self.passes else "a pass"

    def __str__(self) -> str:
        passes = (
            f"{self.tokens} in {self.passes} forward passes ({self.tokens_per_pass:.2f} "
            f"{self._each_pass})"
        )
        lines = [("tokens", passes)]
        if self.dtype or not self.fallbacks:  # else the original ran
            rounded = f" ({self.dtype})" if self.exactness == "up to rounding" else ""
            lines.append(("exactness", self.exactness + rounded))
        if self.reference:
            lines.append(("reference", self.reference))
        if self.branches > 1:
            lines.append(("guidance", f"{self.branches} rows of a pass per row"))
        if self.of_canvases:
            each = f"{self.canvases_per_pass:.1f} a pass for each row"
            lines.append(("canvases", f"{self.canvases} ({each}; one slot a pass computes 1)"))
        if self.drafts == "coarse" or (self.drafts and self.canvases):
            lines.append(("drafts", self.drafts))
        beside = [
            ("prefix tree", self.prefix_tokens, "tokens of prompts"),
            ("draft model", self.draft_passes, "passes"),
        ]
        lines += [(name, f"{count} {what}") for name, count, what in beside if count]
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
        shown = f" ({shown})" if self.forward_seconds else ""  # not measured after a fallback
        lines.append(("seconds", f"{self.seconds + self.pixel_seconds:.2f}{shown}"))
        if self.runner != "eager" or self.runner_reason:
            because = f": {self.runner_reason}" if self.runner_reason else ""
            if self.runner == "cuda graphs":
                because = f": {self.captures} captured" if self.captures else ": captured before"
            lines.append(("runner", f"{self.runner}{because}"))
        if isinstance(self.seed, int):
            lines.append(("seed", str(self.seed)))
        lines += [("fell back", reason) for reason in self.fallbacks]
        lines += [("note", note) for note in self.notes]
        return "\n".join(f"{name:13}{value}" for name, value in lines)


def add_stats(parts: Sequence[Stats]) -> Stats:
    """The exactness is the weakest of theirs."""
    total: dict[str, Any] = {"policy": parts[0].policy, "branches": parts[0].branches}
    weakest = max(parts, key=lambda part: _STRONGEST_FIRST.index(part.exactness))
    total["exactness"], total["dtype"] = weakest.exactness, weakest.dtype
    runners = {p.runner for p in parts}
    total["runner"] = runners.pop() if len(runners) == 1 else "eager"
    total["runner_reason"] = "; ".join({p.runner_reason: None for p in parts if p.runner_reason})
    for name in ("attention", "route", "route_reason", "reference", "drafts", "seed"):
        total[name] = getattr(parts[-1], name)
    total["fallbacks"] = list(dict.fromkeys(text for p in parts for text in p.fallbacks))
    notes = Counter(text for p in parts for text in p.notes)
    total["notes"] = [
        text if n == len(parts) else f"{text} (in {n} of {len(parts)} batches)"
        for text, n in notes.items()
    ]
    widest = max(len(p.accepted) for p in parts)
    total["accepted"] = [
        sum(p.accepted[k] for p in parts if k < len(p.accepted)) for k in range(widest)
    ]
    for f in fields(Stats):
        if f.name not in total:
            total[f.name] = sum(getattr(p, f.name) for p in parts)
    return Stats(**total)


@dataclass(frozen=True)
class Generation:
    """What a sampler returns: tokens `[B, L]` int64, 0 after a row's end; lengths, passes `[B]`."""

    tokens: Tensor
    lengths: Tensor
    passes: Tensor
    stats: Stats


@dataclass(frozen=True)
class Progress:
    """State passed to `on_step` after every pass, by `[B]` int64 but for the tokens.

    Attributes:
        tokens: `[B, L]` int64, valid up to `lengths`; a view that the next pass changes.
        previous: `lengths` before this pass.
        rows: the prompt's row in each batch slot under `ContinuousBatching`, else empty.
    """

    tokens: Tensor
    lengths: Tensor
    previous: Tensor
    passes: int
    rows: tuple[int, ...] = ()


OnStep = Callable[[Progress], Tensor | None]
"""Called after every pass. May return `[B]` int64: the number of tokens after which each row ends
(a number above the row's length does not end it); None changes nothing. An exception from it stops
the run and is raised to the caller."""
