"""A next-scale model whose prompts a text encoder reads, such as T5's."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import CanvasPass, Prompt
from mmaccel.pipelines.hosts.next_scale.model import NextScaleModel
from mmaccel.pipelines.hosts.next_scale.network import NextScaleTransformer
from mmaccel.tokenizers_vq.multi_scale import ScaleSums

Key = tuple[int, ...]
"""The ids of a text."""


class TextScaleModel(NextScaleModel):
    """Ids V.. of prompts are those of the encoder; the last before the mask, `nothing`, stands for
    no text. A text is read alone, so that its features do not depend on others, and once while it
    is among the run's.
    """

    def __init__(self, network: NextScaleTransformer, quantizer: ScaleSums, encoder: Any) -> None:
        super().__init__(network, quantizer)
        self.encoder = encoder
        self.nothing = network.config.n_conditions - 1
        self._known: dict[Key, tuple[Tensor, Tensor]] = {}

    def moved(self) -> None:
        super().moved()
        self._known = {}

    @abstractmethod
    def encode(self, key: Key) -> tuple[Tensor, Tensor]:
        """What the network reads of a text, two tensors for `texts`."""

    @torch.no_grad()
    def texts(self, ids: Tensor, is_real: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of prompt ids `[R, T]`, what `encode` says of each row's."""
        keys = _keys_of(ids, is_real)
        for key in keys:
            if key not in self._known:
                self._known[key] = self.encode(key)
        return [self._known[key] for key in keys]

    def forward(self, entries: CanvasPass) -> Tensor:
        n_text = entries.tokens.shape[1] - sum(self.lengths)
        ids = entries.tokens[:, :n_text] - self.vocab_size
        self._keep(ids, entries.reads[:, 0, :n_text])
        return super().forward(entries)

    def _read(self, prompt: Prompt) -> None:
        super()._read(prompt)
        self._keep(self._ids, self._is_real)

    def _keep(self, ids: Tensor, is_real: Tensor) -> None:
        """Forget all other texts."""
        keys = set(_keys_of(ids, is_real))
        self._known = {key: known for key, known in self._known.items() if key in keys}


def _keys_of(ids: Tensor, is_real: Tensor) -> list[Key]:
    """The real ids of each row of `[R, T]`. Cost: a host synchronisation."""
    rows = zip(ids.tolist(), is_real.tolist(), strict=True)
    return [tuple(i for i, is_one in zip(*row, strict=True) if is_one) for row in rows]
