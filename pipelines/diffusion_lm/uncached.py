"""Denoisers without a KV cache: every pass is over all columns.

Models with code of their own in their checkpoint each take masks and positions in their own way;
`mmaccel.pipelines.diffusion_lm.models` has one child for each.

A model of images and text (MMaDA, Lumina-DiMOO) has its image tokens in one range of its
vocabulary. Its canvases have a numbering of their own: 0..V-1 are the image tokens, V is the mask
token, and the model's id i is V + 1 + i. So samplers see a small vocabulary, and a canvas can still
hold every id of the model: prompts, and tokens between the rows of an image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Denoiser
from mmaccel.errors import OptionError
from mmaccel.pipelines.causal_lm.compatibility import check_capacity, check_mode, find_device
from mmaccel.pipelines.diffusion_lm.options import (
    check_options,
    find_mask_token,
    find_max_positions,
)
from mmaccel.pipelines.diffusion_lm.self_check import check_denoiser
from mmaccel.pipelines.runner.own_products import (
    find_own_products,
    open_own_products,
    own_products,
)


class UncachedDenoiser(Denoiser):
    """Base of these; see `mmaccel.contracts.Denoiser`.

    Args:
        model: an instance of its checkpoint's code, in evaluation mode.
        mask_token: id of an open slot in the model's vocabulary; None takes the configuration's
            `mask_token_id`, or `default_mask_token` of the family.
        block: positions per block of a block-causal model.
        images: (first id, count) of the image tokens, for canvases of images.

    Attributes:
        n_ids: ids of the model.

    Raises:
        UnsupportedModelError: a model that fails its self-check.
        OptionError: an option outside its domain.
    """

    offers = Denoiser.offers | {"admitted rows"}
    shift = 0
    default_mask_token: int | None = None

    def __init__(
        self,
        model: Any,
        mask_token: int | None = None,
        *,
        block: int | None = None,
        images: tuple[int, int] | None = None,
    ) -> None:
        mask_token = find_mask_token(model, mask_token, self.default_mask_token)
        n_ids = int(model.get_input_embeddings().weight.shape[0])
        check_options(0, block, mask_token, n_ids)
        self.model, self.block, self._mask = model, block, mask_token
        first, size = (0, n_ids) if images is None else images
        if first < 0 or size < 1 or first + size > n_ids:
            raise OptionError(
                f"images: expected (first id, count) within {n_ids} ids, received {images}; "
                "None for canvases of text"
            )
        self._first = first
        self._is_slice = images is not None
        self.vocab_size = size
        self.mask_token = size if images else mask_token
        self.n_ids = n_ids
        self.max_positions = find_max_positions(model.config)
        check_mode(model)
        check_denoiser(self)

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens."""
        return find_device(self.model)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.model.dtype

    def to_canvas(self, ids: Tensor) -> Tensor:
        """Ids of the model, as in a prompt or a layout, in the numbering of canvases."""
        return ids + self.vocab_size + 1 if self._is_slice else ids

    def to_model(self, tokens: Tensor) -> Tensor:
        """Ids in the numbering of canvases, as the model's."""
        if not self._is_slice:
            return tokens
        size = self.vocab_size
        other = torch.where(tokens == size, self._mask, tokens - size - 1)
        return torch.where(tokens < size, tokens + self._first, other)

    def reserve(self, rows: int, cache_size: int) -> None:
        """See `Denoiser.reserve`.

        Raises:
            OptionError: more columns than the model has positions, or training mode.
        """
        check_capacity(rows, cache_size, self.max_positions)
        check_mode(self.model)
        open_own_products(self.model)

    @torch.no_grad()
    def forward(self, entries: CanvasPass) -> Tensor:
        """One pass; see `Denoiser.forward`."""
        queries = (entries.queries - self.shift).clamp(min=0)
        ids, visible = self.to_model(entries.tokens), entries.reads[:, 0]  # [R, N]
        with own_products(find_own_products(self.model), ids):
            logits = self.run(ids, entries.positions, visible, queries)
        return logits[..., self._first : self._first + self.vocab_size]

    def run(self, ids: Tensor, positions: Tensor, visible: Tensor, queries: Tensor) -> Tensor:
        """Logits `[R, Q, V]` of the model's whole vocabulary.

        Args:
            ids: `[R, N]` int64, the model's own.
            positions: `[R, N]` int64, counted from a row's first token.
            visible: `[R, N]` bool, columns that are attended to.
            queries: `[R, Q]` int64, columns of the model's output.
        """
        raise NotImplementedError

    def run_by_length(self, ids: Tensor, visible: Tensor, queries: Tensor, **inputs: Any) -> Tensor:
        """`run` for models that take neither masks nor positions.

        Rows with equally many visible columns go through the model together, without padding.

        Cost: one call of the model for each number of columns.
        """
        first, count = visible.int().argmax(1), visible.sum(1)  # visible columns are contiguous
        logits: Tensor | None = None
        for n in count.unique().tolist():
            rows = (count == n).nonzero()[:, 0]
            columns = first[rows, None] + torch.arange(n, device=ids.device)  # [R', n]
            at = (queries[rows] - first[rows, None]).clamp(max=n - 1)  # hidden columns: any logits
            part = self.call(ids[rows].gather(1, columns), at, **inputs)
            if logits is None:
                logits = part.new_empty(*queries.shape, part.shape[-1])
            logits[rows] = part
        assert logits is not None
        return logits

    def call(self, ids: Tensor, queries: Tensor, **inputs: Any) -> Tensor:
        """Logits `[R, Q, V]` of rows without padding."""
        raise NotImplementedError
