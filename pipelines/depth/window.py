"""DepthWindow: the codes of one frame of speech, decoded in windows along depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Pass, TokenModel
from mmaccel.pipelines.causal_lm.compatibility import find_device
from mmaccel.pipelines.depth.decoders import DepthDecoder


@dataclass(frozen=True)
class DepthFrames:
    """The layout of codes in frames of P entries and the codes that follow them.

    Args:
        frame: entries of a frame.
    """

    frame: int

    @property
    def columns(self) -> int:
        """0: the codes of a frame form no rows."""
        return 0

    def forced(self, slots: Tensor) -> Tensor | None:
        """None: no code is known in advance."""
        return None

    def allowed(self, slots: Tensor) -> Tensor | None:
        """None: all codes are allowed."""
        return None


class DepthWindow(TokenModel):
    """A depth decoder over one frame of each row, as a token model.

    A pass scores the frame from its beginning, by the decoder's own forward without a cache: a
    frame is as short as a window, and on an accelerator a pass over all of it takes as long as a
    step. So a window costs nothing to roll back, and rows may be at codes of their own.

    Args:
        model: the depth decoder.
        decoder: its kind.
        given: by name, what the frame is scored with.
        n_earlier: entries of earlier frames in front of the prompt, which the decoder never sees.

    Attributes:
        own_prompt, pass_options: as in `CausalLMWindow`; a frame has none.
    """

    own_prompt = None

    def __init__(
        self, model: Any, decoder: DepthDecoder, given: Mapping[str, Any], n_earlier: int = 0
    ) -> None:
        self.model = model
        self.vocab_size = decoder.vocab_size(model)
        self.pass_options: dict[str, Any] = {}
        self._decoder = decoder
        self._given = given
        self._n_earlier = n_earlier
        self._most = decoder.n_entries(model)
        self._entries = torch.zeros(0, 0, dtype=torch.int64)  # [R, n], written so far

    @property
    def device(self) -> torch.device:
        """See `mmaccel.contracts.Model`."""
        return find_device(self.model)

    def reserve(self, rows: int, positions: int) -> None:
        """See `mmaccel.contracts.Model.reserve`."""
        room = self._n_earlier + self._most + 1  # the last one is never read
        self._entries = torch.zeros(rows, room, dtype=torch.int64, device=self.device)

    def prefill(self, entries: Pass) -> None:
        """Write the prompt; the first pass scores it. See `TokenModel.prefill`."""
        self._write(entries)
        if self.recorder is not None:  # of the prompt a call gets nothing
            none = SimpleNamespace(hidden_states=())
            self.recorder.take_prompt(none, SimpleNamespace(layers=()))

    @torch.no_grad()
    def forward(self, entries: Pass) -> Tensor:
        """One pass over the frames; see `TokenModel.forward`.

        Cost: on a CPU of the entries up to the last one wanted, else of a whole frame.
        """
        at = (self._write(entries) - self._n_earlier).clamp(0, self._most - 1)  # [R, W]
        n = int(at.max()) + 1 if at.device.type == "cpu" else self._most
        frame = self._entries[:, self._n_earlier : self._n_earlier + n]
        if self.recorder is not None:
            states = self._decoder.embed(self.model, frame)
            if states is not None:
                self.recorder.record("hidden_states", (_take(states, at),))
        return _take(self._decoder.score(self.model, frame, self._given), at)

    def _write(self, entries: Pass) -> Tensor:
        """Write the entries of a pass; their indices `[R, W]` int64."""
        indices = entries.indices
        at = indices.clamp(max=self._entries.shape[1] - 1)
        self._entries.scatter_(1, at, entries.tokens)
        return indices


def _take(values: Tensor, at: Tensor) -> Tensor:
    """Of `[R, n, V]` what stands at `at` `[R, W]`."""
    return values.gather(1, at[..., None].expand(-1, -1, values.shape[2]))
