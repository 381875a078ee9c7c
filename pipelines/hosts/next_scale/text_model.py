"""A next-scale model whose prompts a text encoder reads, such as T5's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmaccel.contracts import CanvasPass, Prompt
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.hosts.next_scale.cross_attention import CrossTransformer, Text
from mmaccel.pipelines.hosts.next_scale.model import NextScaleModel
from mmaccel.tokenizers_vq.multi_scale import ScaleSums

Key = tuple[int, ...]


class TextScaleModel(NextScaleModel):
    """Ids V.. of prompts are those of the encoder, and `nothing`, of which as many as a text has
    stand for no text. A text is read alone, so that its features do not depend on others.
    """

    model: CrossTransformer

    def __init__(self, network: CrossTransformer, quantizer: ScaleSums, encoder: Any) -> None:
        super().__init__(network, quantizer)
        self.encoder = encoder
        self.nothing = network.config.n_conditions - 1
        self._known: dict[Key, tuple[Tensor, Tensor]] = {}  # pooled and states of the run's texts

    def moved(self) -> None:
        super().moved()
        self._known = {}

    def tell(self, ids: Tensor, is_real: Tensor) -> tuple[Any, Tensor]:
        known = []
        for key in keys_of(ids, is_real):
            if key not in self._known:
                self._known[key] = self._encode(key)
            known.append(self._known[key])
        states = [each for _, each in known]
        lengths = is_real.sum(1)
        index = torch.arange(max(map(len, states)), device=ids.device)
        text = Text(
            torch.stack([pooled for pooled, _ in known]),
            pad_sequence(states, batch_first=True),
            (index < lengths[:, None])[:, None, None],
        )
        return text, torch.ones_like(is_real[:, :1])

    @torch.no_grad()
    def _encode(self, key: Key) -> tuple[Tensor, Tensor]:
        if key[0] == self.nothing:
            features = self.model.cfg_uncond[: len(key)]
        else:
            ids = torch.tensor([key], device=ready(self.encoder), dtype=torch.int64)
            features = self.encoder(input_ids=ids).last_hidden_state[0]
        return self.model.read(features.to(ready(self.model), self.dtype))

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
        keys = set(keys_of(ids, is_real))
        self._known = {key: known for key, known in self._known.items() if key in keys}


def keys_of(ids: Tensor, is_real: Tensor) -> list[Key]:
    """The real ids of each row of `[R, T]`. Cost: a host synchronisation."""
    rows = zip(ids.tolist(), is_real.tolist(), strict=True)
    return [tuple(i for i, is_one in zip(*row, strict=True) if is_one) for row in rows]
