"""The head of EAGLE drafts: a layer that continues the large model's hidden states.

Y. Li, F. Wei, C. Zhang, H. Zhang, "EAGLE: Speculative Sampling Requires Rethinking Feature
Uncertainty", ICML 2024 (arXiv 2401.15077), section 4; "EAGLE-2", EMNLP 2024 (arXiv 2406.16858), the
same head under dynamic trees; "EAGLE-3", NeurIPS 2025 (arXiv 2503.01840), section 3.

An entry has a token and the state f that came before it, and predicts the state after it:

    EAGLE 1 and 2:  x = W [e; f],  f is the state that the large model's output matrix reads
    EAGLE 3:        q, k, v of [norm(e); norm(f)],  f = W [states of three layers] at first

Published folders hold `config.json` of a Llama and `model.safetensors`. The layout is known by the
width of `fc.weight`, and the names are those of the authors (`layers.0.` or `midlayer.`). An EAGLE
3 head scores `draft_vocab_size` tokens; `d2t` says how far each stands from its id in the large
model's vocabulary.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmaccel.checks import Domain, is_one, show, within
from mmaccel.config_files import read_json, read_settings, read_value
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.samplers.drafting.shared_ids import spread_logits

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_VOCABULARY = Domain(2)
_WIDTH = Domain(1, 2**17)
_HEADS = Domain(1, 1024)
_PUBLISHED = {  # the authors' prefix of our names
    **dict.fromkeys(("fc", "norm", "lm_head"), ""),
    **dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), "midlayer."),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "midlayer.self_attn."),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "midlayer.mlp."),
}
_MAKE = "download it, or make one with `mmaccel train-head`"
_LEFT_OUT = ("t2d", "rotary_emb.inv_freq", "self_attn.rotary_emb.inv_freq")  # follow from others


@dataclass(frozen=True)
class EagleConfig:
    """Sizes of a head.

    Attributes:
        vocab_size: V, of the large model.
        draft_vocab_size: tokens that the head scores.
        hidden_size: C, of the head.
        intermediate_size: of its MLP.
        num_attention_heads, num_key_value_heads, head_dim: of its attention.
        features: F, width of the large model's states that an entry reads.
        aux_layers: the layers whose inputs these are, side by side; empty: the last states.
        rms_norm_eps, rope_theta: as in transformers.
        norm_before_residual: whether the residual stream begins behind the norm of f.
    """

    vocab_size: int = field(metadata={"domain": _VOCABULARY})
    draft_vocab_size: int = field(metadata={"domain": _VOCABULARY})
    hidden_size: int = field(metadata={"domain": _WIDTH})
    intermediate_size: int = field(metadata={"domain": _WIDTH})
    num_attention_heads: int = field(metadata={"domain": _HEADS})
    num_key_value_heads: int = field(metadata={"domain": _HEADS})
    head_dim: int = field(metadata={"domain": Domain(2, 4096)})
    features: int = 0
    aux_layers: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    rope_theta: float = within(10000.0, 0, 1e12, above_low=True)
    norm_before_residual: bool = False

    @property
    def is_third(self) -> bool:
        """Whether it is an EAGLE 3 head."""
        return bool(self.aux_layers)


class HeadCache(NamedTuple):
    """Keys and values of a head.

    Attributes:
        keys, values: `[B, S, Hkv, d]`; an entry stands at its column.
        first: `[B]` int64, the first column that holds one.
    """

    keys: Tensor
    values: Tensor
    first: Tensor


class Entries(NamedTuple):
    """Entries of a head before they attend.

    Attributes:
        residual: `[B, K, C]`.
        queries: `[B, K, H, d]`.
        keys, values: `[B, K, Hkv, d]`.
    """

    residual: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor


class EagleModel(nn.Module):
    """A head over one large model.

    Args:
        config: sizes.
        embedding: `[V, C]`, input embeddings of the large model; a head may have its own.
        output: `[V, C]`, output matrix of the large model, which an EAGLE 1 head uses.
    """

    def __init__(self, config: EagleConfig, embedding: Tensor, output: Tensor) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding.detach()
        self.output = output.detach()
        width = config.hidden_size
        read = 2 * width if config.is_third else width  # by the attention
        inner = config.intermediate_size
        heads = config.num_attention_heads * config.head_dim
        key_heads = config.num_key_value_heads * config.head_dim
        fc_width = config.features if config.is_third else width + config.features
        self.fc = nn.Linear(fc_width, width, bias=not config.is_third)
        self.q_proj = nn.Linear(read, heads, bias=False)
        self.k_proj = nn.Linear(read, key_heads, bias=False)
        self.v_proj = nn.Linear(read, key_heads, bias=False)
        self.o_proj = nn.Linear(heads, width, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(width, config.rms_norm_eps)
        if config.is_third:
            self.input_layernorm = nn.RMSNorm(width, config.rms_norm_eps)
            self.hidden_norm = nn.RMSNorm(width, config.rms_norm_eps)
            self.norm = nn.RMSNorm(width, config.rms_norm_eps)
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.targets: Tensor
        self.register_buffer("targets", torch.arange(config.draft_vocab_size), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights."""
        return self.fc.weight.dtype

    @property
    def width(self) -> int:
        """C, of its states."""
        return self.config.hidden_size

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """See `EagleConfig`."""
        return self.config.aux_layers

    def empty_cache(self, rows: int, columns: int) -> HeadCache:
        """A cache of `rows` rows without entries."""
        config = self.config
        shape = (rows, columns, config.num_key_value_heads, config.head_dim)
        keys = self.fc.weight.new_zeros(shape)
        first = torch.full((rows,), columns, device=keys.device, dtype=torch.int64)
        return HeadCache(keys, torch.zeros_like(keys), first)

    def enter(self, features: Tensor) -> Tensor:
        """States f `[B, K, C]` of the large model's `[B, K, F]`."""
        features = features.to(self.dtype)
        if not self.config.is_third:
            return features
        entered: Tensor = self.fc(features)
        return entered

    def forward(self, tokens: Tensor, states: Tensor, columns: Tensor, cache: HeadCache) -> Tensor:
        """States `[B, K, C]` after the entries; their keys and values are written to the cache.

        Args:
            tokens: `[B, K]` int64, of the entries.
            states: `[B, K, C]`, f: those of `enter`, or what this function has returned.
            columns: `[B, K]` int64, ascending, where they are written.
            cache: whose entries up to its own column each entry attends to.
        """
        entry = self.project(tokens, states, columns)
        index = columns[..., None, None].expand_as(entry.keys)
        cache.keys.scatter_(1, index, entry.keys)
        cache.values.scatter_(1, index, entry.values)
        at = torch.arange(cache.keys.shape[1], device=tokens.device)
        is_held = at >= cache.first[:, None, None]  # [B, 1, S]
        own = columns[..., None]
        mask = (is_held & (at <= own)) | (at == own)  # [B, K, S]
        attended = F.scaled_dot_product_attention(
            entry.queries.transpose(1, 2),
            cache.keys.transpose(1, 2),
            cache.values.transpose(1, 2),
            attn_mask=mask[:, None],
            enable_gqa=True,
        )
        return self.finish(entry, attended.transpose(1, 2))

    def project(self, tokens: Tensor, states: Tensor, columns: Tensor) -> Entries:
        """What entries ask and hold; see `forward`."""
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
        angles = self._angles(columns)
        return Entries(
            residual,
            turn(self.q_proj(x).view(shape), angles),
            turn(self.k_proj(x).view(shape), angles),
            self.v_proj(x).view(shape),
        )

    def finish(self, entry: Entries, attended: Tensor) -> Tensor:
        """States `[B, K, C]` of entries, given what they attended to `[B, K, H, d]`."""
        hidden = entry.residual + self.o_proj(attended.flatten(2))
        x = self.post_attention_layernorm(hidden)
        after: Tensor = hidden + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return after

    def logits(self, states: Tensor) -> Tensor:
        """Logits `[..., V]` float32 of states `[..., C]`; very small ones of tokens that it never
        scores, which may be all that a slot can have.
        """
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

    def _angles(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[B, K, 1, d]` of columns `[B, K]`."""
        d = self.config.head_dim
        powers = torch.arange(0, d, 2, device=columns.device).float() / d
        turns = columns[..., None].float() * self.config.rope_theta**-powers  # [B, K, d/2]
        turns = torch.cat([turns, turns], -1)[:, :, None]
        return turns.cos().to(self.dtype), turns.sin().to(self.dtype)


def turn(heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions of `[B, K, H, d]`, halves paired as Llama's are."""
    cos, sin = angles
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def save_eagle(model: EagleModel, folder: str | Path, card: dict[str, Any]) -> None:
    """Write a head in the layout of its authors, float16, weights first.

    Args:
        model: an EAGLE 3 head, without embeddings of its own.
        folder: made where missing.
        card: what goes into `config.json` beside the sizes.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = asdict(model.config)
    layers = config.pop("aux_layers")
    sizes = {name: value for name, value in config.items() if name != "features"}
    content = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        **sizes,
        **card,
    }
    weights = {
        _PUBLISHED[name.partition(".")[0]] + name: value for name, value in model.named_parameters()
    }
    tensors = {name: value.detach().half().contiguous() for name, value in weights.items()}
    tensors["d2t"] = model.targets - torch.arange(len(model.targets), device=model.targets.device)
    save_file(tensors, folder / (WEIGHTS + ".tmp"))
    (folder / (CONFIG + ".tmp")).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    for name in (WEIGHTS, CONFIG):
        os.replace(folder / (name + ".tmp"), folder / name)


def load_eagle(
    folder: str | Path, *, embedding: Tensor, output: Tensor, n_layers: int
) -> EagleModel:
    """Read a head.

    Args:
        folder: holds `config.json` and `model.safetensors`.
        embedding, output: `[V, D]`, input embeddings and output matrix of the large model.
        n_layers: of the large model.

    Raises:
        OptionError: no such files, or a head of another model.
        UnsupportedModelError: files that do not belong together, or another architecture.
    """
    folder = Path(folder)
    weights = read_tensors(folder, "an EAGLE head", _MAKE)
    tensors = _rename(weights, folder)
    config = _read_config(folder, tensors, embedding, n_layers)
    own = tensors.pop("embed_tokens.weight", None)
    model = EagleModel(config, embedding if own is None else own.to(embedding), output)
    offsets = tensors.pop("d2t", None)
    _check_shapes(model, tensors, folder)
    if own is not None and own.shape != embedding.shape:
        raise UnsupportedModelError(
            f"drafts: expected embeddings {list(embedding.shape)} in {folder / WEIGHTS}, received "
            f"{list(own.shape)}; take the head of this model"
        )
    _check_targets(config, offsets, folder)
    if "fc.bias" not in tensors and not config.is_third:
        tensors["fc.bias"] = torch.zeros(config.hidden_size, dtype=torch.float32)
    model.load_state_dict(tensors, strict=False, assign=True)
    if offsets is not None:
        model.targets = torch.arange(len(offsets)) + offsets.long()
    return model.to(device=output.device, dtype=output.dtype).eval().requires_grad_(False)


def read_tensors(folder: Path, what: str, make: str) -> dict[str, Tensor]:
    """The tensors of a head's folder, by their names.

    Args:
        folder: holds `config.json` and `model.safetensors`.
        what: it is, in messages.
        make: how one is had.

    Raises:
        OptionError: no files of a head.
        UnsupportedModelError: a file that cannot be read, or weights that are not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _check_files(folder, what, make)
    try:
        weights: dict[str, Tensor] = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise UnsupportedModelError(
            f"drafts: expected tensors in {folder / WEIGHTS}, received what safetensors cannot "
            f"read ({error}); copy the file again"
        ) from error
    for name, value in weights.items():
        if not value.isfinite().all():
            raise UnsupportedModelError(
                f"drafts: expected finite weights in {folder / WEIGHTS}, received NaN or infinity "
                f"in {name}; copy the file again"
            )
    return weights


def _check_files(folder: Path, what: str, make: str) -> None:
    """Raise OptionError unless the files of a head lie in a folder."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            pickled = any((folder / f"pytorch_model{end}").is_file() for end in (".bin", ".pt"))
            remedy = (
                "pickled weights are not opened; save them with safetensors" if pickled else make
            )
            raise OptionError(
                f"drafts: expected {what} ({CONFIG} and {WEIGHTS}) in {folder}, received no "
                f"{name}; {remedy}"
            )


def _rename(weights: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Tensors by their names in `EagleModel`."""
    renamed = {}
    for name, value in weights.items():
        short = name
        for prefix in ("midlayer.", "layers.0.", "self_attn.", "mlp."):
            short = short.removeprefix(prefix)
        if name not in _LEFT_OUT and short not in _LEFT_OUT and not short.endswith("inv_freq"):
            renamed[short] = value
        if name.startswith("layers.1."):
            raise UnsupportedModelError(
                f"drafts: expected a head of one layer in {folder}, received {name}; take another "
                "head"
            )
    return renamed


def _read_config(
    folder: Path, tensors: dict[str, Tensor], embedding: Tensor, n_layers: int
) -> EagleConfig:
    """The sizes in `config.json`, and the layout that the tensors have."""
    file = folder / CONFIG
    found = read_json(file, option="drafts")
    inner = read_value(found, "transformer_layer_config", dict | None, file, "drafts")
    sizes: dict[str, Any] = {**found, **(inner or {})}
    rope = read_value(sizes, "rope_parameters", dict | None, file, "drafts") or {}
    heads, wide = sizes.get("num_attention_heads"), sizes.get("hidden_size")
    sizes.setdefault("num_key_value_heads", heads)
    sizes.setdefault("rope_theta", rope.get("rope_theta"))
    sizes["draft_vocab_size"] = found.get("draft_vocab_size", sizes.get("vocab_size"))
    sizes["norm_before_residual"] = found.get("norm_before_residual")
    if sizes.get("head_dim") is None and is_one(heads, int) and is_one(wide, int) and heads:
        sizes["head_dim"] = wide // heads
    config = read_settings(EagleConfig, sizes, file, "drafts")
    vocab_size, width = embedding.shape
    fc = tensors.get("fc.weight")
    is_third = "hidden_norm.weight" in tensors
    features = 0
    if fc is not None and fc.ndim == 2:
        features = fc.shape[1] if is_third else fc.shape[1] - config.hidden_size
    aux_layers = _read_layers(found, n_layers, file) if is_third else ()
    wanted = width * max(1, len(aux_layers))
    is_fit = config.vocab_size == vocab_size and config.hidden_size == width
    if not is_fit or features != wanted:
        raise OptionError(
            f"drafts: expected a head of width {width} for {vocab_size} tokens and states of "
            f"{wanted}, received one of width {config.hidden_size} for {config.vocab_size} and "
            f"{features} in {folder}; take the head of this model"
        )
    if sizes.get("rope_scaling") is not None:
        raise UnsupportedModelError(
            f"drafts: expected a head without rope_scaling in {folder / CONFIG}, received "
            f"{show(sizes['rope_scaling'])}; take another head"
        )
    return replace(config, features=features, aux_layers=aux_layers)


def _read_layers(found: dict[str, Any], n_layers: int, file: Path) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE 3 head reads: those that it names, else the authors'."""
    nested = read_value(found, "eagle_config", dict | None, file, "drafts") or {}
    named = found.get("eagle_aux_hidden_state_layer_ids")
    named = named or nested.get("eagle_aux_hidden_state_layer_ids")
    named = (2, n_layers // 2, n_layers - 3) if named is None else named
    is_list = isinstance(named, list | tuple)
    if not is_list or not all(isinstance(n, int) and 0 <= n < n_layers for n in named):
        raise OptionError(
            f"drafts: expected eagle_aux_hidden_state_layer_ids in 0..{n_layers - 1}, received "
            f"{show(named)}; take the head of this model"
        )
    return tuple(named)


def _check_targets(config: EagleConfig, offsets: Tensor | None, folder: Path) -> None:
    """Raise UnsupportedModelError unless `d2t` says where every scored token is."""
    n_ids = config.draft_vocab_size
    if offsets is None and n_ids == config.vocab_size:
        return
    targets = (
        torch.zeros(0, dtype=torch.float32)
        if offsets is None
        else torch.arange(len(offsets)) + offsets
    )
    is_whole = len(targets) == n_ids
    if not is_whole or int(targets.min()) < 0 or int(targets.max()) >= config.vocab_size:
        raise UnsupportedModelError(
            f"drafts: expected d2t of {n_ids} tokens among {config.vocab_size} in "
            f"{folder / WEIGHTS}, received {len(targets)}; copy the file again"
        )


def _check_shapes(model: EagleModel, tensors: dict[str, Tensor], folder: Path) -> None:
    """Raise UnsupportedModelError unless a file has the tensors of a head, and no others."""
    wanted = {name: value.shape for name, value in model.named_parameters()}
    missing = sorted(set(wanted) - set(tensors) - {"fc.bias"})
    others = sorted(set(tensors) - set(wanted))
    wrong = [n for n in wanted if n in tensors and tensors[n].shape != wanted[n]]
    if missing or others or wrong:
        raise UnsupportedModelError(
            f"drafts: expected the tensors of an EAGLE head in {folder / WEIGHTS}, received "
            f"{show([*others, *wrong]) if others or wrong else 'a file'} and no "
            f"{show(missing) if missing else 'other'}; take a head of the layout of EAGLE 1, 2 or 3"
        )
