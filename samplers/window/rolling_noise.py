"""Noise of a moving window: made at every pass, or on a CPU in advance and that of a slot once.

Frozen noise depends on (seed, item, slot) alone, so that what one pass made serves the next. It is
made for some slots in advance, as a small amount takes as long as a larger one. What a row needs
lies in one piece, of a single row a view; past the end it is moved to the front. Fresh uniforms are
made for some passes at once. On other devices kernels make noise again in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.samplers.noise import Fresh, Noise

_AHEAD = 2**18  # values of a row that are made in advance, at most
_AT_ONCE = 2**16  # values that are made at once, which takes 12 bytes a value
_PASSES = 16  # whose fresh uniforms are made at once


class PassNoise:
    """The noise of a run's passes, made at every pass: on any device, also in captured steps."""

    def __init__(self, vocab_size: int, temperature: float, widest: int, length: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = temperature
        self.widest = widest
        self.length = length

    def frozen(self, noise: Noise, slots: Tensor) -> Tensor:
        """Frozen Gumbel noise `[B, W, V]` of slots `[B, W]`; see `Noise.frozen`."""
        return noise.frozen(slots, self.vocab_size, self.temperature)

    def fresh(self, noise: Noise, slots: Tensor, passes: Tensor) -> Fresh:
        """Uniforms of a pass for slots `[B, W]`; see `Noise.fresh`."""
        return noise.fresh(slots, passes)

    def forget(self) -> None:
        """The rows of the run have changed."""


class NoiseAhead(PassNoise):
    """The same noise where steps are read on a CPU: made in advance for the rows as they stand."""

    _rolling: RollingNoise | None = None
    _fresh: FreshAhead | None = None

    def frozen(self, noise: Noise, slots: Tensor) -> Tensor:
        """As there; it may be a view of what the next passes read."""
        if self.temperature == 0:
            return super().frozen(noise, slots)
        if self._rolling is None:
            self._rolling = RollingNoise(noise, self.vocab_size, self.widest, self.length)
        return self._rolling.take(slots)

    def fresh(self, noise: Noise, slots: Tensor, passes: Tensor) -> Fresh:
        if self._fresh is None:
            self._fresh = FreshAhead(noise)
        return self._fresh.take(slots, passes)

    def forget(self) -> None:
        self._rolling = None
        self._fresh = None


class RollingNoise:
    """Frozen Gumbel noise of the rows of a run; none is made in advance after slot `length`."""

    def __init__(
        self, noise: Noise, vocab_size: int, widest: int, length: int | None = None
    ) -> None:
        rows = noise.seeds.shape[0]
        room = widest + min(max(widest, 16), _AHEAD // vocab_size)
        self._noise, self._vocab_size, self._length = noise, vocab_size, length
        device = noise.seeds.device
        self._values = torch.empty(rows, room, vocab_size, device=device, dtype=torch.float32)
        self._made = [range(0)] * rows  # slots of each row whose noise stands in `_values`

    def take(self, slots: Tensor) -> Tensor:
        """Noise `[B, W', V]` of W' <= W consecutive slots; a view until the next call."""
        width = slots.shape[1]
        parts = []
        for row, first in enumerate(slots[:, 0].tolist()):
            made = self._made[row]
            if first < made.start or first + width > made.stop:
                made = self._made[row] = self._make(row, first, width)
            at = first - made.start
            parts.append(self._values[row, at : at + width])
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)

    def _make(self, row: int, first: int, width: int) -> range:
        """Make what a row lacks of slots `first`, … and some more; the slots then there."""
        made = self._made[row]
        values = self._values[row]
        end = first + len(values)
        if self._length is not None:
            end = min(end, max(self._length, first + width))
        n_kept = made.stop - first if first in made else 0
        if n_kept:
            values[:n_kept] = values[first - made.start : len(made)].clone()
        noise = self._noise.rows(torch.tensor([row], device=values.device, dtype=torch.int64))
        missing = torch.arange(first + n_kept, end, device=values.device)
        for part in missing.split(max(_AT_ONCE // self._vocab_size, 1)):
            values_made = noise.gumbel_on_host(part[None], self._vocab_size)[0]
            values[n_kept : n_kept + len(part)] = values_made
            n_kept += len(part)
        return range(first, end)


class FreshAhead:
    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._made: list[Tensor] = []  # `[B, _PASSES, K]` of each kind, for K slots
        self._first: list[tuple[int, int]] = []  # the pass and the slot of each row's first ones

    def take(self, slots: Tensor, passes: Tensor) -> Fresh:
        """`Noise.fresh` of slots `[B, W]`, consecutive in each row, in each row's pass `[B]`."""
        width = slots.shape[1]
        wanted = list(zip(passes.tolist(), slots[:, 0].tolist()))
        # by how many passes and slots each row is ahead of what was made
        at = [(p - p0, s - s0) for (p, s), (p0, s0) in zip(wanted, self._first)]
        room = self._made[0].shape[2] - width if self._made else -1
        if len(at) != len(wanted) or any(not (0 <= p < _PASSES and 0 <= s <= room) for p, s in at):
            self._make(slots[:, :1], passes, 4 * width)
            self._first = wanted
            at = [(0, 0)] * len(wanted)
        if len(at) == 1:
            ((p, s),) = at
            return Fresh(*(made[:, p, s : s + width] for made in self._made))
        parts = (
            torch.stack([made[row, p, s : s + width] for row, (p, s) in enumerate(at)])
            for made in self._made
        )
        return Fresh(*parts)

    def _make(self, first: Tensor, passes: Tensor, n_slots: int) -> None:
        batch = len(passes)
        device = first.device
        rows = torch.arange(batch, device=device).repeat_interleave(_PASSES)
        steps = (passes[:, None] + torch.arange(_PASSES, device=device)).flatten()
        slots = first[rows] + torch.arange(n_slots, device=device)
        fresh = self._noise.rows(rows).fresh_on_host(slots, steps)
        self._made = [kind.reshape(batch, _PASSES, n_slots) for kind in fresh]
