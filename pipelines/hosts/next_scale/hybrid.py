"""The transformer of HART, a next-scale model with a text in front.

H. Tang et al., "HART: Efficient Visual Generation with Hybrid Autoregressive Transformer", 2024
(arXiv 2410.10812), section 3. Features of a text are the first entries, padding among them; the
last is the slot of scale 0. Their maximum modulates the norm before the head, and nothing the
layers.

As published, an axis turns the first or the second half of a head's numbers, while the two that
turn together stand half a head apart; rows and columns count from the text's last position on.

Names of tensors are VAR's (`network.py`); **F** is the width of the features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmaccel.checks import within
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.hosts.next_scale.network import (
    HeadNorm,
    NextScaleConfig,
    NextScaleTransformer,
)
from mmaccel.pipelines.hosts.next_scale.text_model import Key, TextScaleModel
from mmaccel.tokenizers_vq.multi_scale import MultiScaleQuantizer


@dataclass(frozen=True)
class HybridConfig(NextScaleConfig):
    """Sizes and layout; `longest` entries stand for every text, of features of width F."""

    n_features: int = within(1536, 1, 2**16)
    longest: int = within(300, 1, 2**16)
    norms_features: bool = True


class Context(NamedTuple):
    """What the network has read of the texts of R rows."""

    entries: Tensor  # [R, T, W]
    positions: Tensor  # [R, T], float32


class RootNorm(nn.RMSNorm):
    """An RMS norm in the number format of its input."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class PooledHeadNorm(HeadNorm):
    """An RMS norm that takes scale and shift from the condition."""

    def __init__(self, config: NextScaleConfig) -> None:
        super().__init__(replace(config, adaptive="own"))
        self.ln_wo_grad: nn.Module = RootNorm(config.width, config.norm_eps)  # type: ignore[assignment]


class HybridTransformer(NextScaleTransformer):
    """Sums of codes to logits of the next scale's tokens; a `Context` stands for prompts."""

    config: HybridConfig

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        del self.class_emb
        features = config.n_features
        norm = nn.RMSNorm(features, config.norm_eps) if config.norms_features else nn.Identity()
        self.context_norm = norm
        self.context_embed = nn.Linear(features, config.width)
        self.head_nm = PooledHeadNorm(config)

    def read(self, features: Tensor) -> Tensor:
        """Features `[..., F]` as entries `[..., W]`."""
        return self.context_embed(self.context_norm(features))

    def first_entries(self, ids: Any) -> Tensor:
        return ids.entries + self.lvl_embed.weight[0]

    def condition(self, ids: Any) -> tuple[None, Tensor]:
        return None, ids.entries.amax(1)

    def turns_of(self, scale: int, ids: Any, is_real: Tensor) -> Tensor:
        if scale == 0:
            turn = self.text_turns(ids.positions)
            assert turn is not None
            return turn
        side, last = self.config.sides[scale], self.config.sides[-1]
        steps = torch.arange(side, device=ids.positions.device) / side * last
        at = ids.positions[:, -1:] + steps  # [R, n]
        angles = at[..., None] * self._frequencies(2)  # [R, n, D / 4]
        rows = angles[:, :, None].expand(-1, -1, side, -1)
        columns = angles[:, None].expand(-1, side, -1, -1)
        turned = torch.cat((rows, rows, columns, columns), -1).flatten(1, 2)
        return torch.stack((turned.cos(), turned.sin()))[:, :, None]


@dataclass(frozen=True)
class TextReader:
    """A text encoder and how it is asked: the ids of a text follow `system`, padded with `pad`."""

    model: Any
    system: tuple[int, ...]
    pad: int
    pads_left: bool

    def read(self, ids: Key, length: int) -> tuple[Tensor, Tensor]:
        """Features `[length, F]` of a text, padding included, and positions `[length]`."""
        device = ready(self.model)
        padding = [self.pad] * (length - len(ids))
        padded = [*padding, *ids] if self.pads_left else [*ids, *padding]
        asked = torch.tensor([[*self.system, *padded]], device=device, dtype=torch.int64)
        is_real = torch.ones_like(asked)
        is_real[0, len(self.system) :] = asked[0, len(self.system) :] != self.pad
        out = self.model(input_ids=asked, attention_mask=is_real).last_hidden_state
        positions = is_real[0, len(self.system) :].cumsum(0) - 1
        return out[0, len(self.system) :], positions.float()


class HybridModel(TextScaleModel):
    """Of a text it knows entries and positions, `longest` of each."""

    model: HybridTransformer

    def __init__(
        self, network: HybridTransformer, quantizer: MultiScaleQuantizer, reader: TextReader
    ) -> None:
        super().__init__(network, quantizer, reader.model)
        self.reader = reader

    def tell(self, ids: Tensor, is_real: Tensor) -> tuple[Any, Tensor]:
        entries, positions = zip(*self.texts(ids, is_real), strict=True)
        context = Context(torch.stack(entries), torch.stack(positions))
        return context, torch.ones_like(context.positions, dtype=torch.bool)

    def encode(self, key: Key) -> tuple[Tensor, Tensor]:
        config = self.model.config
        size = config.longest, config.n_features
        features = torch.zeros(size, device="cpu", dtype=torch.float32)
        positions = features[:, 0]
        if key[0] != self.nothing:
            features, positions = self.reader.read(key, config.longest)
        device = ready(self.model)  # an encoder that is moved for a text leaves
        return self.model.read(features.to(device, self.dtype)), positions.to(device)
