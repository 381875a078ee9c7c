"""The window as such: which slots it covers, what stands in them, what is fed for them.

No model and no counts here; `mmaccel.samplers.window.run` runs passes over it.

The line: prompt, tokens and drafts of a batch in one tensor, and where a row of it ends.

A row's prompt stands right-aligned, so that slot i of every row has the same column; what a model
calls a position is counted from the row's own first token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.errors import ShapeError
from mmaccel.samplers.window.proposers import Frontier, Proposal, check_source, propose

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def open_token_buffer(prompt: Prompt, room: int, origin: int) -> Tensor:
    """The line before the first token.

    Args:
        prompt: its first `batch` rows (the conditional branch) are written.
        room: columns behind the prompt, for tokens and drafts.
        origin: column of slot 0, at least T.

    Returns:
        `[B, origin + room]` int64: -1, then the prompt, then 0 from slot 0 on.
    """
    batch = prompt.batch
    shift = origin - prompt.lengths[:batch, None]
    index = torch.arange(origin, device=prompt.tokens.device)[None] - shift  # [B, origin]
    aligned = prompt.tokens[:batch].gather(1, index.clamp(min=0))
    aligned = torch.where(index >= 0, aligned, -1)
    return torch.cat([aligned, aligned.new_zeros(batch, room)], 1)


def last_tokens(prompt: Prompt) -> Tensor:
    """Last prompt token of every row of every branch, `[R, 1]` int64."""
    return prompt.tokens.gather(1, prompt.lengths[:, None] - 1)


def cut_at_stop(tokens: Tensor, n_new: Tensor, stop_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """End rows behind their first stop token.

    Args:
        tokens: `[B, W]` int64, new tokens.
        n_new: `[B]` int64, how many of them count.
        stop_tokens: `[S]` int64.

    Returns:
        How many count now, `[B]` int64 (the stop token is the last), and which rows ended, `[B]`
        bool.
    """
    width = tokens.shape[1]
    index = torch.arange(width, device=tokens.device)[None]
    stops = (tokens[..., None] == stop_tokens).any(-1) & (index < n_new[:, None])
    first = torch.where(stops, index, width).amin(1)  # [B]
    return torch.minimum(n_new, first + 1), first < width


def check_limit(limit: Any, made: Tensor) -> Tensor:
    """What `on_step` returned, as lengths `[B]` int64, at least 0.

    Raises:
        ShapeError: it is no tensor like `made` `[B]`.
    """
    if isinstance(limit, Tensor) and limit.shape == made.shape and limit.dtype in _WHOLE:
        return limit.to(made).clamp(min=0)
    is_tensor = isinstance(limit, Tensor)
    received = f"{limit.dtype} {list(limit.shape)}" if is_tensor else repr(limit)
    raise ShapeError(
        f"on_step: expected None or whole lengths [{made.shape[0]}] in return, received "
        f"{received}; return progress.lengths to end every row"
    )


_STEP = 64  # room for columns and slots is rounded up to it, so that prompts of many lengths share


class Extent(NamedTuple):
    """Room of a run: columns before slot 0, slots, and positions of the model's cache."""

    origin: int
    slots: int
    positions: int


def measure(
    prompt: Prompt, length: int, *, rounded: bool = False, most: int | None = None
) -> Extent:
    """The room a run takes.

    Args:
        prompt: what stands before slot 0.
        length: slots wanted.
        rounded: leave some room for other prompts and lengths.
        most: positions the model has, if that is known; nothing is rounded up beyond.
    """
    origin, needed = prompt.tokens.shape[1], prompt.tokens.shape[1] + length - 1
    if not rounded:
        return Extent(origin, length, needed)  # the last token is never processed
    origin, slots = (-(-n // _STEP) * _STEP for n in (origin, length))
    positions = origin + slots - 1
    return Extent(origin, slots, positions if most is None else max(needed, min(positions, most)))


class TokenBuffer:
    """A window of drafts on the line of every row.

    Args:
        prompt: what stands before slot 0.
        vocab_size: V.
        length: slots wanted per row.
        widest: largest width there will be.
        source: where new slots' drafts come from, see `mmaccel.samplers.window.proposers`.
        is_static: keep every tensor that outlives a pass in its place.
        extent: room of the run; None takes what this prompt and length need.

    Attributes:
        width: W; 0 before the first `place`.
        slots: `[B, W]` int64, the slots covered.
        columns: `[B, W]` int64, where those slots stand in `line`.
        line: `[B, N]` int64, prompt (left-padded with -1), tokens and drafts.
        made: `[B]` int64, tokens made so far.
        places: by name, where `hold` keeps what it is given.
        impossible: `[S]` int64, ids that are not worth a draft, or None.
        is_refilled: whether a row may begin while others go on.

    Raises:
        OptionError: for a draft source that needs a layout the prompt lacks.
    """

    made: Tensor
    is_refilled = False

    def __init__(
        self,
        prompt: Prompt,
        vocab_size: int,
        length: int,
        widest: int,
        source: str,
        is_static: bool = False,
        extent: Extent | None = None,
    ) -> None:
        check_source(source, prompt.layout, final=True)
        self.prompt, self.vocab_size, self.length, self.source = prompt, vocab_size, length, source
        self.extent = measure(prompt, length) if extent is None else extent
        self.origin = self.extent.origin  # column of slot 0 in `line`
        self.token_buffer = open_token_buffer(prompt, self.extent.slots + widest, self.origin)
        self.made = prompt.tokens.new_zeros(prompt.batch)
        self._last_of_prompt = last_tokens(prompt)
        self._filled = self.made + self.origin
        self.held_state: dict[str, Tensor] = {}
        self._held: set[str] = set()
        self._is_static = is_static
        self.impossible: Tensor | None = None
        self.place(0)

    def restart(self, places: Tensor, prompt: Prompt) -> None:
        """Begin anew in some places.

        Args:
            places: `[n]` int64.
            prompt: of all B places.
        """
        self.prompt = prompt
        self._last_of_prompt.copy_(last_tokens(prompt))
        opened = open_token_buffer(prompt, self.token_buffer.shape[1] - self.origin, self.origin)
        self.token_buffer[places] = opened[places]
        self.made[places] = 0
        self._filled[places] = self.origin

    def keep(self, places: Tensor, prompt: Prompt) -> None:
        """Go on with some places alone, `[n]` int64; the prompt is theirs."""
        self.prompt, self._last_of_prompt = prompt, last_tokens(prompt)
        self.token_buffer, self.made = self.token_buffer[places], self.made[places]
        self._filled = self._filled[places]
        self.held_state = {name: value[places] for name, value in self.held_state.items()}

    def place(self, width: int) -> None:
        """Cover the next `width` slots of every row."""
        self.width = width
        self.slots = self.made[:, None] + torch.arange(width, device=self.made.device)  # [B, W]
        self.columns = self.origin + self.slots

    def hold(self, name: str, value: Tensor) -> None:
        """Keep a tensor for the next pass, always of one shape. Nobody writes to it any more."""
        place = self.held_state.get(name)
        if place is None or not self._is_static:
            self.held_state[name] = value
        else:
            place.copy_(value)
        self._held.add(name)

    def held(self, name: str) -> Tensor | None:
        """What the last pass kept under a name; None before the first."""
        return self.held_state[name] if name in self._held else None

    def standing(self) -> Tensor:
        """`[B, W-1]` bool: draft slots of the window that the last pass predicted."""
        return self.columns[:, :-1] < self._filled[:, None]

    def forget_drafts(self) -> None:
        """Let nothing of the last pass stand as a draft."""
        self._filled.copy_(self.origin + self.made)

    def propose(self) -> Proposal:
        """Ask the draft source about all draft slots of the window (`[B, W-1]`)."""
        frontier = Frontier(
            self.token_buffer,
            self.columns[:, :-1],
            self._filled,
            self.slots[:, :-1],
            self.held("last scores"),
            self.prompt.layout,
            self.vocab_size,
            self.impossible,
            self.made == 0 if self.is_refilled else None,
        )
        return propose(self.source, frontier)

    def forced(self) -> Tensor | None:
        """What the layout demands at each draft slot, `[B, W-1]` int64, -1 where free; or None."""
        layout = self.prompt.layout
        return None if layout is None else layout.forced(self.slots[:, :-1])

    def write_drafts(self, new: Tensor) -> Tensor:
        """Write drafts: `new` `[B, W-1]` where nothing stands, and forced tokens.

        Returns:
            `[B, W-1]` int64, the drafts that will be fed.
        """
        columns = self.columns[:, :-1]
        drafts = torch.where(self.standing(), self.token_buffer.gather(1, columns), new)
        forced = self.forced()
        if forced is not None:
            drafts = torch.where(forced >= 0, forced, drafts)
        self.token_buffer.scatter_(1, columns, drafts)
        return drafts

    def window_inputs(self, columns: Tensor) -> Tensor:
        """Tokens of `line` at `columns` `[B, K]` for all branches, `[R, K]`.

        Before slot 0 each branch has the last token of its own prompt.
        """
        branches = self.prompt.branches
        tokens = self.token_buffer.gather(1, columns).repeat(branches, 1)
        is_prompt = (columns < self.origin).repeat(branches, 1)
        return torch.where(is_prompt, self._last_of_prompt, tokens)
