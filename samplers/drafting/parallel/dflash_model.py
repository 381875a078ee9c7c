"""The network of DFlash drafts: a block of masks that reads the large model's states.

J. Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036. A few
layers denoise a block in one pass. In every layer a mask attends to the block, in both directions,
and to keys and values that the layer makes of the large model's states, mixed once:

    h = norm(W [states behind some layers]),  keys and values of [h; norm(x)],  queries of norm(x)

The block begins with the last known token; entry k of it predicts its own token. Embeddings and the
output matrix are the large model's.

Layouts: transformers' (`MuseGlimmerAssistantModel`, `generate(speculation_type="dflash")`) and the
authors' (`DFlashDraftModel`, sizes in `dflash_config`). DFlash 2, which adds convolutions and a
selector of candidates, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmaccel.checks import Domain, show
from mmaccel.config_files import read_value
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.samplers.drafting.heads.eagle_model import (
    DecoderLayer,
    HeadCache,
    HeadSizes,
    attend,
    turn,
)
from mmaccel.weight_folders import Schema, open_folder, shapes_of

_LAYERS = Domain(1, 256)


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(HeadSizes):
    # N, entries of a block, the last known token among them; all others are masks
    block_size: int = field(metadata={"domain": Domain(2, 4096)})
    mask_token_id: int
    num_hidden_layers: int = field(metadata={"domain": _LAYERS})  # L
    target_layers: tuple[int, ...] = ()  # of the large model, behind which states are read
    spans: tuple[int | None, ...] = ()  # by layer, the farthest entry it attends to; None: all
    causal: tuple[bool, ...] = ()  # by layer, whether an entry sees nothing behind itself
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0  # of logits


class DFlashLayer(DecoderLayer):
    def __init__(self, config: HeadSizes) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.add_linears(config, config.hidden_size)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def hold(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, K, Hkv, d]` of entries `[B, K, C]`."""
        shape = (*x.shape[:-1], -1, self.head_dim)
        return turn(self.k_norm(self.k_proj(x).view(shape)), angles), self.v_proj(x).view(shape)

    def forward(
        self, hidden: Tensor, context: tuple[Tensor, Tensor], mask: Tensor, angles: Any
    ) -> Tensor:
        """The next layer's `[B, N, C]`; `mask` is `[B, N, S + N]` bool over context and block."""
        x = self.input_layernorm(hidden)
        queries = self.q_norm(self.q_proj(x).view(*x.shape[:-1], -1, self.head_dim))
        block = self.hold(x, angles)
        keys, values = (torch.cat(both, 1) for both in zip(context, block, strict=True))
        return self.add_mlp(hidden, attend(turn(queries, angles), keys, values, mask))


class DFlashModel(nn.Module):
    """A network over one large model, whose input embeddings and output matrix are `[V, C]`."""

    def __init__(self, config: DFlashConfig, embedding: Tensor, output: Tensor) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding.detach()
        self.output = output.detach()
        width = config.hidden_size
        self.fc = nn.Linear(len(config.target_layers) * width, width, bias=False)
        self.output_norm_enc = nn.RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)

    def empty_cache(self, rows: int, columns: int) -> HeadCache:
        """Keys and values `[B, S, L, Hkv, d]`."""
        config = self.config
        sizes = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
        return HeadCache.empty(self.fc.weight, rows, columns, *sizes)

    def read(self, features: Tensor, columns: Tensor, cache: HeadCache) -> None:
        """Write what the layers make of the large model's states `[B, K, F]` at their columns."""
        mixed = self.output_norm_enc(self.fc(features.to(self.fc.weight.dtype)))
        angles = self.config.find_angles(columns, self.fc.weight.dtype)
        pairs = []
        for layer in self.layers:
            assert isinstance(layer, DFlashLayer)
            pairs.append(layer.hold(mixed, angles))
        for stored, of_layers in zip((cache.keys, cache.values), zip(*pairs)):
            new = torch.stack(of_layers, 2)  # [B, K, L, Hkv, d]
            stored.scatter_(1, columns[..., None, None, None].expand_as(new), new)

    def forward(self, last: Tensor, columns: Tensor, cache: HeadCache) -> Tensor:
        """Logits `[B, N-1, V]` float32 behind the last known token, `[B]` int64, which stands at
        `columns` `[B]` int64; states of all columns before it are context.
        """
        config = self.config
        n = config.block_size
        masks = last.new_full((len(last), n - 1), config.mask_token_id)
        ids = torch.cat([last[:, None], masks], 1)
        hidden = F.embedding(ids, self.embedding).to(self.fc.weight.dtype) * config.embedding_scale
        at = columns[:, None] + torch.arange(n, device=last.device)  # [B, N]
        angles = config.find_angles(at, self.fc.weight.dtype)
        stored = torch.arange(cache.keys.shape[1], device=last.device).expand(len(last), -1)
        is_known = (stored >= cache.first[:, None]) & (stored < columns[:, None])  # [B, S]
        where = torch.cat([stored, at], 1)[:, None]  # [B, 1, S + N]
        is_held = torch.cat([is_known, torch.ones_like(at, dtype=torch.bool)], 1)[:, None]
        behind = where - at[..., None]  # [B, N, S + N]
        for index, layer in enumerate(self.layers):
            mask = is_held.expand(-1, n, -1)
            span = config.spans[index]
            if span is not None:
                mask = mask & (behind.abs() <= span)
            if config.causal[index]:
                mask = mask & (behind <= 0)
            context = cache.keys[:, :, index], cache.values[:, :, index]
            hidden = layer(hidden, context, mask, angles)
        states = self.norm(hidden)[:, 1:]
        logits = F.linear(states, self.output.to(states.dtype)).float()
        return logits * config.output_multiplier


def _find_sizes(content: dict[str, Any], file: Path) -> dict[str, Any]:
    """The sizes of a network in a `config.json` of either layout, by their names here."""
    nested = read_value(content, "dflash_config", dict | None, file, "drafts") or {}
    sizes: dict[str, Any] = {**content, **nested}
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope = read_value(sizes, name, dict | None, file, "drafts") or rope
    others = {
        "selector_rank": "selector_rank" in sizes,  # of DFlash 2
        "conv_kernel_size": "conv_kernel_size" in sizes,
        "hidden_act": sizes.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(sizes.get("attention_bias")),
        "rope_type": rope.get("rope_type", "default") != "default",
        "final_logit_softcapping": bool(sizes.get("final_logit_softcapping")),
    }
    named = [name for name, is_other in others.items() if is_other]
    if named:
        raise UnsupportedModelError(
            f"drafts: expected a DFlash network (DFlash 2 is not read) in {file}, received one "
            f"with {', '.join(named)}; take another draft model"
        )
    n_layers = read_value(sizes, "num_hidden_layers", int, file, "drafts", _LAYERS)
    kinds = read_value(sizes, "layer_types", tuple[str, ...] | None, file, "drafts")
    is_sliding = [kind == "sliding_attention" for kind in kinds or ["full_attention"] * n_layers]
    span = read_value(sizes, "sliding_window", int | None, file, "drafts")
    if len(is_sliding) != n_layers or (any(is_sliding) and span is None):
        raise UnsupportedModelError(
            f"drafts: expected layer_types of {n_layers} layers and a sliding_window in {file}, "
            f"received {show(kinds)} and {show(span)}; copy the file again"
        )
    is_authors = content.get("model_type") == "qwen3"
    reach = None if span is None else span - is_authors
    causal = sizes.get("is_causal")
    if causal is None:  # of the authors' sliding layers; transformers' see both directions
        causal = [sliding and is_authors for sliding in is_sliding]
    else:
        causal = [bool(causal)] * n_layers
    return {
        **sizes,
        "rope_theta": rope.get("rope_theta") or sizes.get("rope_theta"),
        "embedding_scale": sizes.get("input_embedding_scale"),
        "target_layers": sizes.get("target_layer_ids"),
        "spans": [reach if sliding else None for sliding in is_sliding],
        "causal": causal,
    }


def _rename(name: str) -> str:
    if name.startswith("hidden_norm."):  # of the authors
        return name.replace("hidden_norm.", "output_norm_enc.")
    for part in ("encoder.", "self_attn.", "mlp."):
        name = name.replace(part, "")
    return name


FOLDER = Schema("a DFlash network", DFlashConfig, "download it", find=_find_sizes, rename=_rename)


def load_dflash(
    folder: str | Path, *, embedding: Tensor, output: Tensor, n_layers: int
) -> DFlashModel:
    """Read a network for a large model of `n_layers`, whose embeddings and output are `[V, C]`."""
    opened = open_folder(FOLDER, folder)
    config = opened.settings
    vocab_size, width = embedding.shape
    if config.hidden_size != width or config.mask_token_id >= vocab_size:
        raise OptionError(
            f"drafts: expected a network of width {width} with a mask among {vocab_size} tokens, "
            f"received one of width {config.hidden_size} with mask {config.mask_token_id} in "
            f"{folder}; take the draft model of this model"
        )
    layers = config.target_layers
    if not layers or max(layers) >= n_layers - 1:
        raise OptionError(
            f"drafts: expected target_layer_ids in 0..{n_layers - 2}, received {show(layers)}; "
            "take the draft model of this model"
        )
    with torch.device("meta"):
        model = DFlashModel(config, embedding, output)
    model.load_state_dict(opened.weights.read(shapes_of(model)), assign=True)
    return model.to(device=output.device, dtype=output.dtype).eval().requires_grad_(False)
