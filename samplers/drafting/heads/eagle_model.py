"""The head of EAGLE drafts: a layer that continues the large model's hidden states.

Y. Li, F. Wei, C. Zhang, H. Zhang, "EAGLE: Speculative Sampling Requires Rethinking Feature
Uncertainty", ICML 2024 (arXiv 2401.15077), section 4; "EAGLE-2", EMNLP 2024 (arXiv 2406.16858), the
same head under dynamic trees; "EAGLE-3", NeurIPS 2025 (arXiv 2503.01840), section 3.

An entry has a token and the state f that came before it, and predicts the state after it:

    EAGLE 1 and 2:  x = W [e; f],  f is the state that the large model's output matrix reads
    EAGLE 3:        q, k, v of [norm(e); norm(f)],  f = W [states of three layers] at first

Published folders hold `config.json` of a Llama and `model.safetensors` with the authors' names
(`layers.0.` or `midlayer.`); the width of `fc.weight` tells the layout. An EAGLE 3 head scores
`draft_vocab_size` tokens; `d2t` is how far each stands from its id in the large vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmaccel.checks import Domain, is_one, show, within
from mmaccel.config_files import read_value
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.kernels.grouped_attention import grouped_attention
from mmaccel.samplers.drafting.shared_ids import spread_logits
from mmaccel.weight_folders import Opened, Schema, open_folder, save_folder, shapes_of

_VOCABULARY = Domain(2)
_WIDTH = Domain(1, 2**17)
_HEADS = Domain(1, 1024)
_PUBLISHED = {  # the authors' prefix of our names
    **dict.fromkeys(("fc", "norm", "lm_head"), ""),
    **dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), "midlayer."),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "midlayer.self_attn."),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "midlayer.mlp."),
}


@dataclass(frozen=True, kw_only=True)
class HeadSizes:
    """Sizes of a head's layers, named as in transformers."""

    hidden_size: int = field(metadata={"domain": _WIDTH})  # C
    intermediate_size: int = field(metadata={"domain": _WIDTH})
    num_attention_heads: int = field(metadata={"domain": _HEADS})
    num_key_value_heads: int = field(metadata={"domain": _HEADS})
    head_dim: int = field(metadata={"domain": Domain(2, 4096)})
    rms_norm_eps: float = 1e-6
    rope_theta: float = within(10000.0, 0, 1e12, above_low=True)

    def find_angles(self, columns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[B, K, 1, d]` of columns `[B, K]`."""
        d = self.head_dim
        powers = torch.arange(0, d, 2, device=columns.device).float() / d
        turns = columns[..., None].float() * self.rope_theta**-powers  # [B, K, d/2]
        turns = torch.cat([turns, turns], -1)[:, :, None]
        return turns.cos().to(dtype), turns.sin().to(dtype)


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadSizes):
    vocab_size: int = field(metadata={"domain": _VOCABULARY})  # V, of the large model
    draft_vocab_size: int = field(metadata={"domain": _VOCABULARY})  # tokens that the head scores
    features: int = 0  # F, width of the large model's states that an entry reads
    aux_layers: tuple[int, ...] = ()  # whose inputs these are, side by side; empty: the last states
    norm_before_residual: bool = False  # the residual stream begins behind the norm of f

    @property
    def is_third(self) -> bool:
        return bool(self.aux_layers)


class HeadCache(NamedTuple):
    """Keys and values of a head; an entry stands at its column."""

    keys: Tensor  # [B, S, ..., Hkv, d]
    values: Tensor
    first: Tensor  # [B] int64, the first column that holds an entry

    @classmethod
    def empty(cls, weight: Tensor, rows: int, columns: int, *sizes: int) -> HeadCache:
        """Without entries `sizes`, of a weight's dtype on its device."""
        keys = weight.new_zeros(rows, columns, *sizes)
        first = torch.full((rows,), columns, device=keys.device, dtype=torch.int64)
        return cls(keys, torch.zeros_like(keys), first)


class Entries(NamedTuple):
    residual: Tensor  # [B, K, C]
    queries: Tensor  # [B, K, H, d]
    keys: Tensor  # [B, K, Hkv, d]
    values: Tensor


class DecoderLayer(nn.Module):
    def add_linears(self, config: HeadSizes, read: int) -> None:
        """Make attention and MLP; `read` is the width of what the attention reads."""
        width, inner = config.hidden_size, config.intermediate_size
        heads = config.num_attention_heads * config.head_dim
        key_heads = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(read, heads, bias=False)
        self.k_proj = nn.Linear(read, key_heads, bias=False)
        self.v_proj = nn.Linear(read, key_heads, bias=False)
        self.o_proj = nn.Linear(heads, width, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(width, config.rms_norm_eps)

    def add_mlp(self, residual: Tensor, attended: Tensor) -> Tensor:
        """States `[B, K, C]` of entries, given what they attended to `[B, K, H, d]`."""
        hidden = residual + self.o_proj(attended.flatten(2))
        x = self.post_attention_layernorm(hidden)
        after: Tensor = hidden + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return after


class EagleModel(DecoderLayer):
    """A head over one large model, whose `[V, C]` input embeddings and output matrix it may use."""

    def __init__(self, config: EagleConfig, embedding: Tensor, output: Tensor) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding.detach()
        self.output = output.detach()
        width = config.hidden_size
        fc_width = config.features if config.is_third else width + config.features
        self.fc = nn.Linear(fc_width, width, bias=not config.is_third)
        self.add_linears(config, 2 * width if config.is_third else width)
        if config.is_third:
            self.input_layernorm = nn.RMSNorm(width, config.rms_norm_eps)
            self.hidden_norm = nn.RMSNorm(width, config.rms_norm_eps)
            self.norm = nn.RMSNorm(width, config.rms_norm_eps)
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.targets: Tensor
        self.register_buffer("targets", torch.arange(config.draft_vocab_size), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def width(self) -> int:
        return self.config.hidden_size

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    def empty_cache(self, rows: int, columns: int) -> HeadCache:
        sizes = (self.config.num_key_value_heads, self.config.head_dim)
        return HeadCache.empty(self.fc.weight, rows, columns, *sizes)

    def enter(self, features: Tensor) -> Tensor:
        """States f `[B, K, C]` of the large model's `[B, K, F]`."""
        features = features.to(self.dtype)
        if not self.config.is_third:
            return features
        entered: Tensor = self.fc(features)
        return entered

    def forward(self, tokens: Tensor, states: Tensor, columns: Tensor, cache: HeadCache) -> Tensor:
        """States `[B, K, C]` after the entries; their keys and values are written to the cache.

        `states` `[B, K, C]` are f: those of `enter`, or what this function has returned. `columns`
        `[B, K]` int64 ascend, and an entry attends to the cache up to its own.
        """
        entry = self.project(tokens, states, columns)
        index = columns[..., None, None].expand_as(entry.keys)
        cache.keys.scatter_(1, index, entry.keys)
        cache.values.scatter_(1, index, entry.values)
        at = torch.arange(cache.keys.shape[1], device=tokens.device)
        is_held = at >= cache.first[:, None, None]  # [B, 1, S]
        column = columns[..., None]
        mask = (is_held & (at <= column)) | (at == column)  # [B, K, S]
        attended = attend(entry.queries, cache.keys, cache.values, mask)
        return self.add_mlp(entry.residual, attended)

    def project(self, tokens: Tensor, states: Tensor, columns: Tensor) -> Entries:
        config = self.config
        embedded = F.embedding(tokens, self.embedding).to(self.dtype)
        if config.is_third:
            normed = self.hidden_norm(states)
            residual = normed if config.norm_before_residual else states
            x = torch.cat([self.input_layernorm(embedded), normed], -1)
        else:
            residual = self.fc(torch.cat([embedded, states], -1))
            x = residual
        shape = (*tokens.shape, -1, config.head_dim)
        angles = config.find_angles(columns, self.dtype)
        return Entries(
            residual,
            turn(self.q_proj(x).view(shape), angles),
            turn(self.k_proj(x).view(shape), angles),
            self.v_proj(x).view(shape),
        )

    def logits(self, states: Tensor) -> Tensor:
        """Logits `[..., V]` float32 of states `[..., C]`; tiny ones of tokens never scored."""
        if self.config.is_third:
            known = self.lm_head(self.norm(states)).float()  # [..., K]
        else:
            known = F.linear(states, self.output.to(states.dtype)).float()
        if known.shape[-1] == self.config.vocab_size:
            return known
        return spread_logits(known, self.targets, self.config.vocab_size)

    def trim(self, ids: Tensor) -> None:
        """From now on score those of `ids` `[K]` alone that it has scored so far."""
        is_kept = torch.isin(self.targets, ids.to(self.targets.device))
        self.targets = self.targets[is_kept]
        if self.config.is_third:
            weight = self.lm_head.weight.detach()[is_kept]
            self.lm_head.weight = nn.Parameter(weight, requires_grad=False)
        else:
            self.output = self.output[self.targets]


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention `[B, K, H, d]` of queries over `[B, S, Hkv, d]`; `mask` is `[B, K, S]` bool."""
    heads = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
    return grouped_attention(*heads, mask[:, None]).transpose(1, 2)


def turn(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions of `[B, K, H, d]`, halves paired as Llama's are."""
    cos, sin = angles
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def _find_sizes(content: dict[str, Any], file: Path) -> dict[str, Any]:
    inner = read_value(content, "transformer_layer_config", dict | None, file, "drafts")
    sizes: dict[str, Any] = {**content, **(inner or {})}
    rope = read_value(sizes, "rope_parameters", dict | None, file, "drafts") or {}
    if sizes.get("rope_scaling") is not None:
        raise UnsupportedModelError(
            f"drafts: expected a head without rope_scaling in {file}, received "
            f"{show(sizes['rope_scaling'])}; take another head"
        )
    heads, wide = sizes.get("num_attention_heads"), sizes.get("hidden_size")
    sizes.setdefault("num_key_value_heads", heads)
    sizes.setdefault("rope_theta", rope.get("rope_theta"))
    sizes["draft_vocab_size"] = content.get("draft_vocab_size", sizes.get("vocab_size"))
    sizes["norm_before_residual"] = content.get("norm_before_residual")
    if sizes.get("head_dim") is None and is_one(heads, int) and is_one(wide, int) and heads:
        sizes["head_dim"] = wide // heads
    nested = read_value(content, "eagle_config", dict | None, file, "drafts") or {}
    name = "eagle_aux_hidden_state_layer_ids"
    sizes["aux_layers"] = content.get(name) or nested.get(name)
    sizes["features"] = 0  # follows from the tensors
    return sizes


def _rename(name: str) -> str:
    """A tensor's name in `EagleModel`; "" for what follows from others."""
    for prefix in ("midlayer.", "layers.0.", "self_attn.", "mlp."):
        name = name.removeprefix(prefix)
    return "" if name == "t2d" or name.endswith("inv_freq") else name


FOLDER = Schema(
    "an EAGLE head",
    EagleConfig,
    "download it, or make one with `mmaccel train-head`",
    find=_find_sizes,
    rename=_rename,
)


def save_eagle(model: EagleModel, folder: str | Path, card: dict[str, Any]) -> None:
    """Write an EAGLE 3 head in its authors' layout, float16; `card` goes into `config.json`."""
    sizes = asdict(model.config)
    layers = sizes.pop("aux_layers")
    del sizes["features"]
    content = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        **sizes,
        **card,
    }
    tensors: dict[str, Tensor] = {
        _PUBLISHED[name.partition(".")[0]] + name: value for name, value in model.named_parameters()
    }
    tensors["d2t"] = model.targets - torch.arange(len(model.targets), device=model.targets.device)
    save_folder(FOLDER, folder, content, tensors)


def load_eagle(
    folder: str | Path, *, embedding: Tensor, output: Tensor, n_layers: int
) -> EagleModel:
    """Read a head for a model of `n_layers`, whose embeddings and output matrix are `[V, D]`."""
    opened = open_folder(FOLDER, folder)
    config = _fit(opened, embedding, n_layers)
    with torch.device("meta"):
        outline = EagleModel(config, embedding, output)
    n_ids = config.draft_vocab_size
    shapes = shapes_of(outline) | {"embed_tokens.weight": tuple(embedding.shape), "d2t": (n_ids,)}
    optional = ["fc.bias", "embed_tokens.weight"]
    if n_ids == config.vocab_size:
        optional.append("d2t")
    tensors = opened.weights.read(shapes, optional)
    embedded = tensors.pop("embed_tokens.weight", None)  # a head may have its own
    targets = torch.arange(n_ids)
    if "d2t" in tensors:
        targets = targets + tensors.pop("d2t").long()
    if int(targets.min()) < 0 or int(targets.max()) >= config.vocab_size:
        raise UnsupportedModelError(
            f"drafts: expected d2t of tokens among {config.vocab_size} in {opened.weights.file}, "
            f"received {int(targets.min())}..{int(targets.max())}; copy the file again"
        )
    if not config.is_third:
        tensors.setdefault("fc.bias", torch.zeros(config.hidden_size, dtype=torch.float32))
    with torch.device("meta"):
        if embedded is not None:
            embedding = embedded.to(embedding)
        model = EagleModel(config, embedding, output)
    model.load_state_dict(tensors, assign=True)
    model.targets = targets
    return model.to(device=output.device, dtype=output.dtype).eval().requires_grad_(False)


def _fit(opened: Opened[EagleConfig], embedding: Tensor, n_layers: int) -> EagleConfig:
    config, shapes = opened.settings, opened.weights.shapes
    layers: tuple[int, ...] = ()
    features = shapes.get("fc.weight", (0, 0))[-1]
    if "hidden_norm.weight" in shapes:  # of EAGLE 3
        layers = config.aux_layers or (2, n_layers // 2, n_layers - 3)  # the authors' default
        if min(layers) < 0 or max(layers) >= n_layers:
            raise OptionError(
                f"drafts: expected eagle_aux_hidden_state_layer_ids in 0..{n_layers - 1}, received "
                f"{show(layers)}; take the head of this model"
            )
    else:
        features -= config.hidden_size
    vocab_size, width = embedding.shape
    read_width = width * max(1, len(layers))
    sizes = (config.vocab_size, config.hidden_size, features)
    if sizes != (vocab_size, width, read_width):
        raise OptionError(
            f"drafts: expected a head of width {width} for {vocab_size} tokens and states of "
            f"{read_width}, received one of width {config.hidden_size} for {config.vocab_size} and "
            f"{features} in {opened.weights.file.parent}; take the head of this model"
        )
    return replace(config, features=features, aux_layers=layers)
