"""The heads of FlashAR: what follows a token of an image to the right, and what below it.

J. Zhou, Y. He, F. Chen, W. Wang, B. Zhuang, "FlashAR: Efficient Post-Training Acceleration for
Autoregressive Image Generation", 2026 (arXiv 2605.09430), and the authors' code for Emu3.5-Image.
With h, the state that the model's output matrix reads, and x, the input of one of its layers:

    v = norm(layers(x)),  copies of the model's layers, whose entries attend to image tokens alone
    logits of a slot = g (output matrix) h(left) + (1 - g) (vertical head) v(above)
    g = sigmoid(MLP [h(left); v(above)]);  1 in the first row, 0 in the first column

Behind the prompt, x stands for v, and g = sigmoid(a line of h).

Published folders hold `config.json` and safetensors of the whole: the trained model (`backbone.`),
its output matrix (`horizontal_head.`) and what is read here. Layers are as Emu3.5's and Qwen3's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmaccel.checks import Domain
from mmaccel.config_files import read_value, shorten
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.samplers.drafting.heads.eagle_model import HeadSizes, attend, turn
from mmaccel.samplers.drafting.parallel.dflash_model import DFlashLayer
from mmaccel.weight_folders import Schema, open_folder, shapes_of

_OUTPUT = "horizontal_head.weight"


@dataclass(frozen=True, kw_only=True)
class DiagonalConfig(HeadSizes):
    vocab_size: int  # V
    num_hidden_layers: int  # of the model
    vertical_layers: int = field(metadata={"domain": Domain(0, 256)})  # L
    vertical_start_layer: int  # of the model, whose input is x; as many as there are: h


class VerticalLayer(DFlashLayer):
    def advance(
        self, hidden: Tensor, cells: Tensor, keys: Tensor, values: Tensor, mask: Tensor, angles: Any
    ) -> Tensor:
        """The next layer's `[R, K, C]`; writes at `cells` `[R, K]` of keys, values `[R, S, H, d]`,
        and reads what `mask` `[R, K, S]` bool says.
        """
        x = self.input_layernorm(hidden)
        queries = self.q_norm(self.q_proj(x).view(*x.shape[:-1], -1, self.head_dim))
        for stored, new in zip((keys, values), self.hold(x, angles), strict=True):
            stored.scatter_(1, cells[..., None, None].expand_as(new), new)
        return self.add_mlp(hidden, attend(turn(queries, angles), keys, values, mask))


class DiagonalHeads(nn.Module):
    """Named as published."""

    def __init__(self, config: DiagonalConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        inner = max(64, width // 8)
        self.vertical_block = nn.ModuleList(
            VerticalLayer(config) for _ in range(config.vertical_layers)
        )
        if config.vertical_layers:
            self.vertical_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.vertical_head = nn.Linear(width, config.vocab_size, bias=False)
        self.hv_gate_mlp = nn.Sequential(
            nn.Linear(2 * width, inner, bias=False), nn.SiLU(), nn.Linear(inner, 1)
        )
        self.hv_gate_corner = nn.Linear(width, 1)

    def empty_cache(self, rows: int, cells: int) -> list[Tensor]:
        """Keys and values `[R, S, L, H, d]`."""
        config = self.config
        sizes = (config.vertical_layers, config.num_key_value_heads, config.head_dim)
        return [self.vertical_head.weight.new_zeros(rows, cells, *sizes) for _ in range(2)]

    def look_down(self, x: Tensor, cells: Tensor, reads: Tensor, cache: list[Tensor]) -> Tensor:
        """v `[R, K, C]` of the tokens at `cells` `[R, K]`, which read `[R, S]` bool."""
        if not self.config.vertical_layers:
            return x
        angles = self.config.find_angles(cells, x.dtype)
        mask = reads[:, None].expand(-1, cells.shape[1], -1)
        for index, layer in enumerate(self.vertical_block):
            assert isinstance(layer, VerticalLayer)
            keys, values = (each[:, :, index] for each in cache)
            x = layer.advance(x, cells, keys, values, mask, angles)
        normed: Tensor = self.vertical_norm(x)
        return normed

    def fuse(
        self, logits: Tensor, h: Tensor, v: Tensor, left: Tensor, above: Tensor,
        has_left: Tensor, has_above: Tensor,
    ) -> Tensor:  # fmt: skip
        """Logits `[R, J, V]` of slots, of the model's own `[R, K, V]`, h and v `[R, K, C]` of
        entries: of which to the left and above, `[R, J]` int64, and whether there are such, bool.
        """
        row = torch.arange(len(left), device=left.device)[:, None]
        h, v = h[row, left], v[row, above]  # [R, J, C]
        gate = self.hv_gate_mlp(torch.cat([h, v], -1)).sigmoid()  # [R, J, 1]
        gate = gate.where((has_left & has_above)[..., None], has_left[..., None].to(gate.dtype))
        corner = self.hv_gate_corner(h).sigmoid()
        gate = gate.where((has_left | has_above)[..., None], corner)
        below: Tensor = self.vertical_head(v)[..., : logits.shape[-1]]
        return gate * logits[row, left] + (1 - gate) * below


def _find_sizes(content: dict[str, Any], file: Path) -> dict[str, Any]:
    if content.get("model_type") != "emu3_flashar":
        raise OptionError(
            f"heads: expected model_type 'emu3_flashar' in {file}, received "
            f"{shorten(content.get('model_type'))}; take a folder of FlashAR's"
        )
    model = read_value(content, "backbone_config", dict, file, "heads")
    if model.get("rope_scaling") is not None:
        raise UnsupportedModelError(
            f"heads: expected layers without rope_scaling in {file}, received "
            f"{shorten(model['rope_scaling'])}; take other heads"
        )
    return {**(model.get("rope_parameters") or {}), **model, **content}


def _rename(name: str) -> str:
    """A tensor's name in `DiagonalHeads`; "" for those of the model."""
    if name.startswith("backbone."):
        return ""
    return name.replace(".self_attn.", ".").replace(".mlp.", ".")


FOLDER = Schema(
    "heads of FlashAR", DiagonalConfig, "download them", find=_find_sizes, rename=_rename,
    option="heads",
)  # fmt: skip


def load_diagonal_heads(folder: str | Path, output: Tensor, n_layers: int) -> DiagonalHeads:
    """Read the heads of a model of `n_layers`, whose output matrix is `[V, C]`.

    Raises:
        OptionError: those of another model: its output matrix is theirs.
    """
    opened = open_folder(FOLDER, folder)
    config = opened.settings
    if config.vertical_start_layer > config.num_hidden_layers:
        raise UnsupportedModelError(
            f"heads: expected vertical_start_layer in 0..{config.num_hidden_layers} in {folder}/"
            f"{FOLDER.config}, received {config.vertical_start_layer}; download them again"
        )
    with torch.device("meta"):
        heads = DiagonalHeads(config)
    published = {_OUTPUT: (config.vocab_size, config.hidden_size)}
    tensors = opened.weights.read(shapes_of(heads) | published)
    own = tensors.pop(_OUTPUT)[: len(output)].to(output)
    if config.num_hidden_layers != n_layers or not torch.equal(own, output):
        raise OptionError(
            f"heads: expected the model that those in {folder} were trained with, received one "
            "with another output matrix or depth; open it with from_pretrained(folder, config="
            "Qwen3Config(**backbone_config), key_mapping={'^backbone': 'model', "
            "'^horizontal_head': 'lm_head'})"
        )
    heads.load_state_dict(tensors, assign=True)
    return heads.to(device=output.device, dtype=output.dtype).eval().requires_grad_(False)
