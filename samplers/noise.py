"""Noise: random numbers that depend on (seed, item, slot) and on nothing else.

Batch, window and device have no influence. Philox 4x32-10 (`mmaccel.kernels.noise`) is keyed with
the row's seed; its counter holds (vocabulary block, slot, item, stream and pass).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmaccel.checks import Checked, check_int, check_length, show
from mmaccel.errors import OptionError
from mmaccel.kernels import dispatch, noise_numpy
from mmaccel.kernels.noise import (
    key_schedule,
    philox,
    spread,
    to_gumbel,
    to_uniform,
    uniforms,
)
from mmaccel.limits import MAX_ITEMS, SEEDS

_DRAW = -1  # what interfaces of images write for a seed that is drawn
_DRAWN = 2**32  # drawn seeds are below: JSON, JavaScript and ComfyUI give them back as they are
_LOW = 0xFFFFFFFF


class Stream(IntEnum):
    """Independent sources of randomness. Two uses that must not be correlated take two streams."""

    FROZEN = 0  # Gumbel noise per slot, the same at every pass
    FRESH = 1  # uniforms per slot, new at every pass
    CHOICE = 2  # Gumbel noise of a choice among slots, new at every pass
    CODE = 3  # one uniform a seed, the shift of its evenly spread codes
    SIBLINGS = 4  # draws of drafts beside the first, new at every pass
    COINS = 5  # uniforms that decide about them, new at every pass


class Fresh(NamedTuple):
    """Independent uniforms in (0, 1), one of each kind per slot: `[B, W]` float32."""

    coins: Tensor  # decide about drafts
    redraws: Tensor  # draw residuals and bonus tokens
    drafts: Tensor  # draw first drafts of new slots


def check_seed(seed: Any) -> int | list[int | None] | None:
    """A seed, or one per row, as integers in 0..2**64-1; None for None and -1, which draw one."""
    plain = seed.tolist() if hasattr(seed, "tolist") else seed  # tensors and arrays
    several = isinstance(plain, Sequence) and not isinstance(plain, str | bytes | bytearray)
    if several:
        check_length("seed", plain)
    try:
        if several and not plain:
            raise TypeError
        values = [_to_integer(one) for one in (plain if several else [plain])]
    except TypeError as error:
        raise OptionError(
            f"seed: expected an integer or one per row, received {show(seed)}; write 0, or -1 to "
            "draw one"
        ) from error
    for value in values:
        if value is not None and not 0 <= value < SEEDS:
            raise OptionError(
                f"seed: expected a 64-bit integer that is not negative, or -1 to draw one, "
                f"received {show(value)}; take it modulo 2**64"
            )
    return values if several else values[0]


def draw_seed(generator: Any = None) -> int:
    """A seed that torch draws, without a generator by its global one of the CPU."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise OptionError(
            f"generator: expected one torch.Generator, received a {type(generator).__name__}; pass "
            "one, or give attach a seed per row"
        )
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(_DRAWN, (), generator=generator, device=device))


def draw_new_seed() -> int:
    """A seed that the system draws, for processes whose generator of torch is always the same."""
    return secrets.randbelow(_DRAWN)


def choose_seed(
    seed: Any, generator: Any = None, draw: Callable[[], int] = draw_seed
) -> int | list[int]:
    """The seed of a call, see `check_seed`, with integers for each None: of a `torch.Generator`,
    which is advanced, of several one each (not beside a seed), or else of `draw`.
    """
    if generator is not None:
        return _draw_seeds(generator, seed)
    checked = check_seed(seed)
    if isinstance(checked, list):
        return [draw() if one is None else one for one in checked]
    return draw() if checked is None else checked


def choose_one_seed(seed: Any, draw: Callable[[], int] = draw_seed) -> int:
    """The seed of what has one alone, see `choose_seed`."""
    chosen = choose_seed(seed, draw=draw)
    if not isinstance(chosen, int):
        raise OptionError(
            f"seed: expected one integer, received {show(seed)}; write 0, or -1 to draw one"
        )
    return chosen


def spread_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """The seed of each row: those given, or one and those that follow it, 0 after the largest."""
    if isinstance(seed, int):
        return [(seed + row) % SEEDS for row in range(rows)]
    if len(seed) != rows:
        raise OptionError(
            f"seed: expected an integer or {rows} of them, received {len(seed)}; "
            "give one seed per row"
        )
    return list(seed)


def _draw_seeds(generator: Any, seed: Any) -> int | list[int]:
    several = isinstance(generator, Sequence)
    if several:
        check_length("generator", generator)
    generators = list(generator) if several else [generator]
    if not generators or not all(isinstance(one, torch.Generator) for one in generators):
        raise OptionError(
            f"generator: expected a torch.Generator or a list of them, received {show(generator)}; "
            "pass seed=0, or torch.Generator().manual_seed(0)"
        )
    if check_seed(seed) is not None:
        raise OptionError(
            f"generator: expected it or a seed, received both (seed {show(seed)}); drop one"
        )
    seeds = [draw_seed(one) for one in generators]
    return seeds if several else seeds[0]


def _to_integer(value: Any) -> int | None:
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, bool):
        raise TypeError
    number = _DRAW if plain is None else index(plain)
    return None if number == _DRAW else number


@dataclass(frozen=True)
class Noise(Checked):
    """Counter-based noise of a batch.

    Args:
        seeds: `[B]` int64, one key per row.
        items: `[B]` int64 in 0..2^32-1, which sample of that seed the row is.
    """

    seeds: Tensor
    items: Tensor

    @classmethod
    def from_seed(
        cls, seed: int | Sequence[int], batch: int, device: torch.device | str = "cpu"
    ) -> Noise:
        """Noise of a batch by one seed (row b is item b), or by one per row (item 0 of each)."""
        check_int("batch", batch, 0, MAX_ITEMS, hint="give the number of rows")
        chosen = choose_seed(seed)
        single = isinstance(chosen, int)
        seeds = [chosen] * batch if isinstance(chosen, int) else spread_seeds(chosen, batch)
        signed = [value - 2**64 if value >= 2**63 else value for value in seeds]
        items = list(range(batch)) if single else [0] * batch
        return cls(
            torch.tensor(signed, dtype=torch.int64, device=device),
            torch.tensor(items, dtype=torch.int64, device=device),
        )

    @classmethod
    def over(cls, tensors: Mapping[str, Tensor]) -> Noise:
        """Noise of B rows in tensors that exist, see `tensors`."""
        noise = cls(tensors["seeds"], tensors["items"])
        vars(noise)["schedule"] = tensors["schedule"]
        return noise

    def tensors(self) -> dict[str, Tensor]:
        """`seeds` `[B]`, `items` `[B]` and `schedule` `[ROUNDS, 2, B, 1, 1]` by name."""
        return {"seeds": self.seeds, "items": self.items, "schedule": self.schedule}

    def rows(self, index: Tensor) -> Noise:
        """The noise of some rows, `[n]` int64, in tensors of its own."""
        return Noise(self.seeds[index], self.items[index])

    def refill(self, other: Noise) -> None:
        """Copy the seeds and items of other noise into the same tensors."""
        self.seeds.copy_(other.seeds)
        self.items.copy_(other.items)
        if "schedule" in vars(self):  # computed from the seeds at the first use
            self.schedule.copy_(other.schedule)

    def frozen(self, slots: Tensor, vocab_size: int, temperature: float) -> Tensor:
        """Frozen Gumbel noise `[B, W, V]`; at temperature 0, which uses none, zeros `[B, W, 1]`."""
        if temperature == 0:
            return torch.zeros(*slots.shape, 1, device=slots.device, dtype=torch.float32)
        return self.gumbel(slots, vocab_size)

    def gumbel(
        self, slots: Tensor, vocab_size: int, stream: Stream = Stream.FROZEN, step: int | Tensor = 0
    ) -> Tensor:
        """Standard Gumbel noise `[B, W, V]` float32 for every token of every slot `[B, W]` int64;
        the first V' < V values of a slot are the same for every V. `step` is the pass number, an
        int, `[]` int64 or each row's own `[B]`; 0 for frozen noise.
        """
        return to_gumbel(self.uniforms(slots, vocab_size, stream, step))  # [B, W, V]

    def uniforms(self, slots: Tensor, n_values: int, stream: Stream, step: int | Tensor) -> Tensor:
        """Uniforms in (0, 1) of every slot, `[B, W, n]` float32; arguments as in `gumbel`."""
        if dispatch.uses_triton(slots.device.type):
            return self._uniforms(slots, n_values, stream, step)
        blocks = torch.arange((n_values + 3) // 4, device=slots.device)
        return spread(self._words(blocks, slots, stream, step), n_values)

    def fresh(self, slots: Tensor, step: int | Tensor) -> Fresh:
        """Uniforms of slots `[B, W]` for a pass, `step` as in `gumbel`: one block's words."""
        if dispatch.uses_triton(slots.device.type):  # one launch, and some 160 below
            return Fresh(*self._uniforms(slots, 3, Stream.FRESH, step).unbind(-1))
        block = torch.zeros(1, dtype=torch.int64, device=slots.device)
        words = torch.stack(self._words(block, slots, Stream.FRESH, step)[:3])  # [3, B, W, 1]
        return Fresh(*to_uniform(words[..., 0]).unbind())

    def codes(self, n: int) -> Tensor:
        """Codes of the rows, `[B]` float64: of item i ``(i mod n + u) / n`` with the seed's uniform
        u, so that each is uniform, and n items in a row divide 0..1 evenly (L. Vilnis et al., ICML
        2023, arXiv 2210.15458, section 4).
        """
        alike = Noise(self.seeds, torch.zeros_like(self.items))
        slot = torch.zeros_like(self.items)[:, None]
        shift = alike._uniforms(slot, 1, Stream.CODE, 0)[:, 0, 0].double()
        return (self.items % n + shift) / n

    def gumbel_on_host(self, slots: Tensor, vocab_size: int) -> Tensor:
        """The bits of `gumbel`, made in numpy: on a CPU and outside of captures."""
        purpose = _purpose(Stream.FROZEN, 0, slots.device)
        values = noise_numpy.uniforms(self.seeds, self.items, slots, vocab_size, purpose)
        return to_gumbel(values)

    def fresh_on_host(self, slots: Tensor, step: int | Tensor) -> Fresh:
        """The bits of `fresh`, made in numpy: on a CPU and outside of captures."""
        purpose = _purpose(Stream.FRESH, step, slots.device)
        values = noise_numpy.uniforms(self.seeds, self.items, slots, len(Fresh._fields), purpose)
        return Fresh(*values.unbind(-1))

    @cached_property
    def schedule(self) -> Tensor:
        """The keys of all rounds, computed from the seeds: `[ROUNDS, 2, B, 1, 1]` int64."""
        seed = self.seeds[:, None, None]
        return key_schedule((seed & _LOW, (seed >> 32) & _LOW))

    def _uniforms(self, slots: Tensor, n_values: int, stream: Stream, step: int | Tensor) -> Tensor:
        purpose = _purpose(stream, step, slots.device)
        return dispatch.run(uniforms, self.seeds, self.items, slots, n_values, purpose)

    def _words(
        self, blocks: Tensor, slots: Tensor, stream: Stream, step: int | Tensor
    ) -> tuple[Tensor, ...]:
        purpose = _purpose(stream, step, slots.device).view(-1, 1, 1)
        # [V / 4], [B, W, 1], [B, 1, 1] and [1 or B, 1, 1]: together [B, W, V / 4]
        counter = (blocks, slots[..., None], self.items[:, None, None], purpose)
        return philox(counter, self.schedule)


def _purpose(stream: Stream, step: int | Tensor, device: torch.device) -> Tensor:
    """Stream and pass as one word of the counter: `[]` int64, or `[B]`."""
    if isinstance(step, int):
        return torch.full((), (int(stream) | step << 8) & _LOW, device=device, dtype=torch.int64)
    return ((step << 8) + int(stream)).bitwise_and_(_LOW)
