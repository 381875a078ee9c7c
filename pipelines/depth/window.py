"""DepthWindow: the codes of one frame of speech, decoded in windows along depth."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmaccel.contracts import Pass, TokenModel
from mmaccel.model_parts import CapturedBuffers
from mmaccel.pipelines.causal_lm.compatibility import find_device
from mmaccel.pipelines.runner.static_buffers import model_state, reads_back, torch_settings

if TYPE_CHECKING:
    from mmaccel.pipelines.depth.family import DepthDecoder


class DepthWindow(TokenModel, CapturedBuffers):
    """A depth decoder over one frame of each row, as a token model.

    Passes are the decoder's own forward. Its heads, embeddings and even layers are those of a book,
    so that an entry stands at one book in all rows: a pass over a cache goes from the first entry
    that a row wants to the last one. What it begins before is dropped from the cache.

    Where the host does not know the entries (on an accelerator), a pass is over the whole frame,
    without a cache: the frame is as short as a window, and takes as long as a step.

    A prompt is the P entries of the frame's beginning, and maybe codes of the frame before it,
    which draft sources read and the decoder never sees.

    Args:
        kind: of the decoder.
        model: the decoder.
        given: by name, what the frame is scored with.

    Attributes:
        own_prompt, pass_options: as in `CausalLMWindow`; a frame has none.
    """

    own_prompt = None
    offers = TokenModel.offers | {"captured steps"}
    captures_prompts = False  # they are written, and no more

    def __init__(
        self, kind: DepthDecoder, model: Any, given: Mapping[str, Any] | None = None
    ) -> None:
        self.model = model
        self.vocab_size = kind.vocab_size(model)
        self.pass_options: dict[str, Any] = {}
        self._kind = kind
        self._given = {} if given is None else given
        self._most = kind.n_entries(model)
        self._cache: Any = None
        self._tokens = torch.zeros(0, 0, dtype=torch.int64)  # [R, positions], written so far
        self._n_prompt = torch.zeros((), dtype=torch.int64)  # tokens of the prompts

    @property
    def device(self) -> torch.device:
        return find_device(self.model)

    def reserve(self, rows: int, positions: int) -> None:
        from transformers import DynamicCache

        self._cache = DynamicCache()
        shape = (rows, positions + 1)  # the last one is never read
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._n_prompt = self._tokens.new_full((), self._kind.n_before)

    def graph_key(self) -> tuple[Any, Hashable, Hashable]:
        given = tuple((name, value.shape, value.dtype) for name, value in self._given.items())
        options = type(self._kind).__name__, given, *torch_settings(self.device)
        return self.model, model_state(self.model), options

    def reserve_static(self, rows: int, positions: int) -> dict[str, Any]:
        self.reserve(rows, positions)
        self._given = {name: value.clone() for name, value in self._given.items()}
        return {"_tokens": self._tokens, "_n_prompt": self._n_prompt, "_given": self._given}

    def load_static(self, buffers: dict[str, Any]) -> None:
        for name, value in self._given.items():
            buffers["_given"][name].copy_(value)
        vars(self).update(buffers)
        self._tokens.zero_()
        self._n_prompt.fill_(self._kind.n_before)

    def prompt_width(self, width: int) -> int:
        return width

    def prefill(self, entries: Pass) -> None:
        """Keep the prompt; the first pass scores it. See `TokenModel.prefill`."""
        last = self._write(entries)[0, -1]
        self._n_prompt.copy_(torch.maximum(self._n_prompt, last + 2))

    @torch.no_grad()
    def forward(self, entries: Pass) -> Tensor:
        """One pass over the frames; see `TokenModel.forward`.

        Cost: on a CPU of the entries from the first wanted one to the last, else of a whole frame.
        """
        kind = self._kind
        n_before = kind.n_before
        at = self._write(entries) - self._n_prompt + n_before  # [R, W], in the frame
        at = at.clamp(0, self._most - 1)
        first, end, cache = 0, self._most, None
        if reads_back(self):
            cache = self._cache
            n_held = cache.get_seq_length()
            first = min(int(at.min()), n_held)
            end = int(at.max()) + 1
            if first < n_held:
                cache.crop(first - n_held)
        # the frame's beginning, and behind the whole prompt its codes
        entry = torch.arange(first, end, device=at.device)
        entry = torch.where(entry < n_before, entry, entry + self._n_prompt - n_before)
        frame = self._tokens[:, entry.clamp(max=self._tokens.shape[1] - 1)]
        return _take(kind.score(self.model, frame, self._given, cache), at - first)

    def _write(self, entries: Pass) -> Tensor:
        """Write the entries of a pass; their indices `[R, W]` int64."""
        indices = entries.indices
        at = indices.clamp(max=self._tokens.shape[1] - 1)
        self._tokens.scatter_(1, at, entries.tokens)
        return indices


def _take(values: Tensor, at: Tensor) -> Tensor:
    """Of `[R, n, V]` what stands at `at` `[R, W]`."""
    return values.gather(1, at[..., None].expand(-1, -1, values.shape[2]))
