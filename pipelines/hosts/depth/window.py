"""DepthWindow: the codes of one frame of speech, decoded in windows along depth."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from mmaccel.contracts import Pass, Route, TokenModel
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.runner.static_buffers import model_state

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.depth.family import DepthDecoder


class DepthWindow(CausalLMWindow):
    """A depth decoder over one frame of each row, as a token model.

    A pass goes from the first entry that a row wants to the last one, an entry being one book in
    all rows; over the whole frame where the host does not know the entries (on an accelerator).
    A prompt is the P entries of the frame's beginning, and maybe codes of the frame before it,
    which draft sources read and the decoder never sees.
    """

    offers = TokenModel.offers | {"captured steps", "fused decoder"}
    own_vocabulary = True
    needs_head = False
    captures_prompts = False  # they are written, and no more
    row_inputs = ("states",)
    reserved = (*CausalLMWindow.reserved, "_tokens", "_n_prompt")

    def __init__(
        self,
        kind: DepthDecoder,
        model: Any,
        states: Tensor | None = None,  # [R, ...], the `state_argument` of its `generate`
        attention: Literal["auto", "model", "kernel"] = "auto",
    ) -> None:
        super().__init__(model, attention=attention, facts=kind.facts(model))
        self.max_positions = None  # of rows, whose prompts hold what the decoder never sees
        self.states = states
        self.known_format = ""
        self._kind = kind
        self._most = kind.n_entries(model)
        self._weights: Hashable = None  # where they were when the stores were reserved
        self._first = 0  # entry of the frame with which the pass begins
        self._n_held = 0  # entries of it that were in passes
        self._tokens = torch.zeros(0, 0, dtype=torch.int64)  # [R, positions], written so far
        self._n_prompt = torch.zeros((), dtype=torch.int64)  # tokens of the prompts

    def plain(self) -> CausalLMWindow:
        """As in `CausalLMWindow`, over random frames of two rows."""
        states = draw_states(self.model, 2, *self._kind.shape(self.model))
        return DepthWindow(self._kind, self.model, states, "model")

    def lack(self, word: str, part: Any = None) -> str:
        why = TokenModel.lack(self, word, part)
        return why and "its passes are those over a frame alone"

    @contextmanager
    def keeping_states(self, is_prompt: bool) -> Iterator[None]:
        yield  # the kind has them

    @property
    def route(self) -> Route:
        chosen = self.forwards
        return Route(chosen.name, chosen.reason, self.attention_reason, same_bits=chosen.same_bits)

    def begin_frame(self, states: Tensor) -> None:
        """Go on with another frame of the same utterance, whose passes are like those before."""
        self.states = states
        self.pass_options = {}
        self.setup.recorder = None

    def reserve(self, rows: int, positions: int) -> None:
        stores = self.caches
        is_kept = stores is not None and stores.layout.rows == rows and self.reads_back
        if not is_kept or self._weights != model_state(self.model):
            super().reserve(rows, self._most)
            self._weights = model_state(self.model)  # behind `super`, which may pack them
        shape = (rows, positions + 1)  # the last one is never read
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._n_prompt = self._tokens.new_full((), self._kind.n_before)
        self._n_held = 0

    def load_static(self, buffers: dict[str, Any]) -> None:
        super().load_static(buffers)
        self._tokens.zero_()
        self._n_prompt.fill_(self._kind.n_before)

    def prompt_width(self, width: int) -> int:
        return width

    def prefill(self, entries: Pass) -> None:
        """Keep the prompt, which the first pass scores."""
        last = self._write(entries)[0, -1]
        self._n_prompt.copy_(torch.maximum(self._n_prompt, last + 2))

    @torch.no_grad()
    def forward(self, entries: Pass) -> Tensor:
        """Cost: on a CPU of entries from the first wanted to the last, else of a whole frame."""
        n_before = self._kind.n_before
        # indices count the prompt with the frame before; `at` [R, W] counts entries of this frame
        at = self._write(entries) - self._n_prompt + n_before
        at = at.clamp(0, self._most - 1)
        first, end = 0, self._most
        if self.reads_back:
            first = min(int(at.min()), self._n_held)
            end = int(at.max()) + 1
        self._first, self._n_held = first, end
        # and back: the frame's beginning, then its codes, which stand behind the whole prompt
        entry = torch.arange(first, end, device=at.device)
        index = torch.where(entry < n_before, entry, entry + self._n_prompt - n_before)
        frame = self._tokens[:, index.clamp(max=self._tokens.shape[1] - 1)]
        start = at.new_full((1,), first).expand(len(at))
        logits: Tensor = self.run_pass(Pass(frame, start)).logits
        return logits.gather(1, (at - first)[..., None].expand(-1, -1, logits.shape[2]))

    def compute(self, **inputs: Any) -> Any:
        entries = inputs.pop("input_ids")
        self.run_caches().layout.reported_length = self._first  # for forwards that count by it
        return SimpleNamespace(logits=self._kind.run(self, entries, self._first, inputs))

    def _write(self, entries: Pass) -> Tensor:
        """Write the entries of a pass; their indices `[R, W]` int64."""
        indices = entries.indices
        at = indices.clamp(max=self._tokens.shape[1] - 1)
        self._tokens.scatter_(1, at, entries.tokens)
        return indices


def draw_states(model: Any, *shape: int) -> Tensor:
    """States of a normal distribution, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
    return drawn.to(model.device, model.dtype)
