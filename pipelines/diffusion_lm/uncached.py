"""What denoisers have in common whose passes are over everything: no cache that could be reused.

Models with code of their own in their checkpoint each take masks and positions in their own way;
what each takes is in `mmaccel.pipelines.diffusion_lm.models`.

A model of images among other things (MMaDA, Lumina-DiMOO) has its image tokens in one stretch
of its vocabulary. Canvases then are numbered anew: 0..V-1 are the image tokens, V is the mask
token, and the model's id i is V + 1 + i. So samplers see a small vocabulary, and prompts and tokens
between the rows of an image are still what they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasPass
from mmaccel.errors import OptionError, ShapeError
from mmaccel.pipelines.causal_lm.compatibility import check_mode, check_room
from mmaccel.pipelines.diffusion_lm.registry import check_options, find_mask_token, find_most
from mmaccel.pipelines.diffusion_lm.self_check import check_denoiser


class UncachedDenoiser:
    """Base of these; see `mmaccel.canvas_contracts.Denoiser`.

    Args:
        model: as its checkpoint's code makes it, in evaluation mode.
        mask_token: id of an open slot in the model's vocabulary; None takes the configuration's
            `mask_token_id`, or what the family published.
        block: positions per block of a block-causal model.
        images: (first id, how many) of the image tokens, where canvases hold these.

    Attributes:
        n_ids: ids that the model knows.

    Raises:
        UnsupportedModelError: a model that does not go by what its family goes by.
        OptionError: an option outside its domain.
    """

    supports_kv_cache, any_rows = False, True
    shift = 0
    usual_mask: int | None = None

    def __init__(
        self,
        model: Any,
        mask_token: int | None = None,
        *,
        block: int | None = None,
        images: tuple[int, int] | None = None,
    ) -> None:
        mask_token = find_mask_token(model, mask_token, self.usual_mask)
        known = int(model.get_input_embeddings().weight.shape[0])
        check_options(0, block, mask_token, known)
        self.model, self.block, self._mask = model, block, mask_token
        first, size = (0, known) if images is None else images
        if first < 0 or size < 1 or first + size > known:
            raise OptionError(
                f"images: expected (first id, how many) within {known} ids, received {images}; "
                "None where canvases hold text"
            )
        self._first, self._is_slice = first, images is not None
        self.vocab_size = size
        self.mask_token = size if images else mask_token
        self.n_ids = known
        self.max_positions = find_most(model.config)
        self._reserved: tuple[int, int] | None = None
        check_mode(model)
        check_denoiser(self)

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self.model.dtype

    def to_canvas(self, ids: Tensor) -> Tensor:
        """The model's ids, as of a prompt or of tokens a layout puts in place, as canvases have
        them.
        """
        return ids + self.vocab_size + 1 if self._is_slice else ids

    def to_model(self, tokens: Tensor) -> Tensor:
        """Ids that canvases and prompts have, as the model's."""
        if not self._is_slice:
            return tokens
        size = self.vocab_size
        other = torch.where(tokens == size, self._mask, tokens - size - 1)
        return torch.where(tokens < size, tokens + self._first, other)

    def reserve(self, rows: int, cache_size: int) -> None:
        """See `Denoiser.reserve`.

        Raises:
            OptionError: more places than the model has positions, or training mode.
        """
        check_room(rows, cache_size, self.max_positions)
        check_mode(self.model)
        self._reserved = (rows, cache_size)

    @torch.no_grad()
    def forward(self, entries: CanvasPass) -> Tensor:
        """One pass; see `Denoiser.forward`.

        Raises:
            ShapeError: before `reserve`, or for more rows or other places than reserved.
        """
        rows, n = entries.tokens.shape
        reserved = self._reserved
        if reserved is None or rows > reserved[0] or n != reserved[1] or entries.reads.shape[1] > 1:
            raise ShapeError(
                f"entries: expected all columns of at most rows x places as reserved ({reserved}), "
                f"received {rows} x {n}, reads {list(entries.reads.shape)}; call reserve first"
            )
        queries = (entries.queries - self.shift).clamp(min=0)
        seen = entries.reads[:, 0]  # [R, N]
        ids = self.to_model(entries.tokens)
        logits = self.run(ids, entries.positions, seen, queries)
        return logits[..., self._first : self._first + self.vocab_size]

    def run(self, ids: Tensor, positions: Tensor, seen: Tensor, queries: Tensor) -> Tensor:
        """Logits `[R, Q, V]` of the model's whole vocabulary.

        Args:
            ids: `[R, N]` int64, the model's own.
            positions: `[R, N]` int64, from a row's first token on.
            seen: `[R, N]` bool, columns that are looked at.
            queries: `[R, Q]` int64, columns whose logits are wanted, as they come out.
        """
        raise NotImplementedError

    def run_alike(self, ids: Tensor, seen: Tensor, queries: Tensor, **inputs: Any) -> Tensor:
        """`run` for models that take neither masks nor positions: rows with as many columns to look
        at go together, without the others.

        Cost: one call of the model for every number of columns that there is.
        """
        first, count = seen.int().argmax(1), seen.sum(1)  # what is seen is in one piece
        logits: Tensor | None = None
        for n in count.unique().tolist():
            rows = (count == n).nonzero()[:, 0]
            begin = first[rows, None]
            columns = begin + torch.arange(n, device=ids.device)  # [R', n]
            at = (queries[rows] - begin).clamp(max=n - 1)  # what is not looked at has no logits
            part = self.call(ids[rows].gather(1, columns), at, **inputs)
            if logits is None:
                logits = part.new_empty(*queries.shape, part.shape[-1])
            logits[rows] = part
        assert logits is not None
        return logits

    def call(self, ids: Tensor, queries: Tensor, **inputs: Any) -> Tensor:
        """Logits `[R, Q, V]` of rows without padding."""
        raise NotImplementedError
