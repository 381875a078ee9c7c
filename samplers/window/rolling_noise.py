"""Frozen noise of a moving window on a CPU: noise of a slot is made once, not at every pass.

Frozen noise depends on (seed, item, slot) alone, so that what one pass made serves the next ones.
A window of W slots moves on by a few slots a pass. Their noise is made for some slots in advance,
as a small amount takes as long as a larger one. Slot i of a row lies at place i mod R of a ring.

On other devices the kernels make noise again in registers, which is cheaper there than reading it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmaccel.samplers.noise import Noise

_AHEAD = 2**18  # values of a row that are made in advance, at most
_AT_ONCE = 2**16  # values of all rows that are made at once, which takes 12 bytes a value


class RollingNoise:
    """Frozen Gumbel noise of the rows of a run.

    Args:
        noise: of the B rows.
        vocab_size: V.
        widest: W, the most slots of a window.
    """

    def __init__(self, noise: Noise, vocab_size: int, widest: int) -> None:
        rows, room = noise.seeds.shape[0], widest + min(max(widest, 16), _AHEAD // vocab_size)
        self._noise, self._vocab_size = noise, vocab_size
        device = noise.seeds.device
        self._rows = torch.arange(rows, device=device)[:, None]
        self._index = torch.arange(room, device=device)
        self._values = torch.empty(rows, room, vocab_size, device=device)
        self._slots = noise.seeds.new_full((rows, room), -1)  # whose noise stands at each place

    def take(self, slots: Tensor) -> Tensor:
        """The noise of these slots.

        Args:
            slots: `[B, W']` int64, consecutive in each row; W' <= W.

        Returns:
            `[B, W', V]` float32, what `Noise.gumbel` gives, in a tensor of its own.
        """
        places = slots % len(self._index)
        if not self._slots.gather(1, places).equal(slots):
            self._fill(slots[:, :1] + self._index)
        return self._values[self._rows, places]

    def _fill(self, wanted: Tensor) -> None:
        """Make what is missing of `wanted` `[B, R]` int64, every place of the ring."""
        places = wanted % len(self._index)
        rows, columns = (self._slots.gather(1, places) != wanted).nonzero(as_tuple=True)
        slots, places = wanted[rows, columns], places[rows, columns]
        n_at_once = max(_AT_ONCE // self._vocab_size, 1)
        for part in zip(*(states.split(n_at_once) for states in (rows, slots, places))):
            own_rows, own_slots, own_places = part
            made = self._noise.rows(own_rows).gumbel(own_slots[:, None], self._vocab_size)
            self._values[own_rows, own_places] = made[:, 0]
        self._slots[rows, places] = slots
