"""LlamaGen's transformer, loaded from its published tensors as a Llama of transformers.

P. Sun et al., "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation", 2024
(arXiv 2406.06525). The angle of a token's row rotates one half of a head's pairs, that of its
column the other half. A pair is two neighbouring channels in the published file and two halves of a
head apart here, so queries and keys are reordered. Positions of the condition, a class label or
features of a text, have no angles: their queries and keys are zero, as in training.

A position of an image token counts all of `SIDE` columns, so that one model draws every size. A
text of fewer features than the model has positions for is cached without padding.

Departures: dropout and training are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmaccel.contracts import Prompt
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.loading.checkpoint import count_layers, fill, rename, shape_of
from mmaccel.pipelines.hosts.loading.moving import move_module

SIDE = 1024  # columns that a position counts; images have fewer
_HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 3200: 32}  # GPT-B, -L, -XL, -XXL, -3B
_LAYER = {  # names of a layer's tensors, published and in transformers
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "cls_embedding.cap_proj.fc1": "condition.fc1",
    "cls_embedding.cap_proj.fc2": "condition.fc2",
    "cls_embedding.uncond_embedding": "condition.unconditional",
}
_MIXED = "attention.wqkv.weight"  # of queries, keys and values, one after the other
_CLASSES = "cls_embedding.embedding_table.weight"
_NO_ANGLES = "the queries and keys of its prompt are zero"


class GridRotary(nn.Module):
    """Rotary embedding whose quarters of D / 2 pairs turn by rows, columns, rows, columns; none at
    the `n_first` positions of the condition.
    """

    speeds: Tensor

    def __init__(self, head_dim: int, n_first: int, base: float = 10000.0) -> None:
        super().__init__()
        self.n_first = n_first
        quarter = head_dim // 4
        exponents = -torch.arange(quarter, device="cpu").float() / quarter
        self.register_buffer("speeds", base**exponents, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions `[R, W]`, two of `[R, W, D]` in the dtype of `x`."""
        slots = (position_ids - self.n_first)[..., None]
        rows = (slots // SIDE) * self.speeds
        columns = (slots % SIDE) * self.speeds
        angles = torch.cat([rows, columns, rows, columns], -1)
        in_image = slots >= 0
        return (angles.cos() * in_image).to(x.dtype), (angles.sin() * in_image).to(x.dtype)


class TextCondition(nn.Module):
    """Embeds features `[R, n_first, width]` of a text, padding included."""

    unconditional: Tensor  # [n_first, width], features that stand for no text

    def __init__(self, n_first: int, width: int, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, dim, bias=False)
        self.fc2 = nn.Linear(dim, dim, bias=False)
        self.register_buffer("unconditional", torch.zeros(n_first, width, dtype=torch.float32))

    def forward(self, features: Tensor) -> Tensor:
        """Features `[R, T, width]` to `[R, T, dim]`."""
        embedded: Tensor = self.fc2(F.gelu(self.fc1(features), approximate="tanh"))
        return embedded


class LlamaGenWindow(CausalLMWindow):
    """LlamaGen for class labels: label k is the id V + k, and the last one stands for no class."""

    options = (*CausalLMWindow.options, "side")

    def __init__(
        self, model: Any, side: int, attention: Literal["auto", "model", "kernel"] = "auto"
    ) -> None:
        super().__init__(model, attention=attention)
        self.side = side
        self.n_first: int = model.model.rotary_emb.n_first
        self.max_positions = self.n_first + side**2

    def plain(self) -> CausalLMWindow:
        """As in `CausalLMWindow`, at positions of the grid."""
        return type(self)(self.model, self.side, "model")

    @property
    def is_text(self) -> bool:
        return False

    @property
    def n_inputs(self) -> int:
        """There are ids of class labels."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def num_classes(self) -> int:
        """Labels, without the one that stands for no class."""
        return self.n_inputs - self.vocab_size - 1

    def lack(self, word: str, part: Any = None) -> str:
        if word in ("eviction", "packed entries") and self.n_first == 1:
            return "its prompt is one class label, of which nothing can be evicted or packed"
        if word == "prompt blocks":
            return "its prompt is a condition, and such methods are for long prompts"
        if word == "prompt keys" and part.every is None:
            return f"{_NO_ANGLES}; give every, by which entries of the image go"
        if word == "prompt keys" and part.budget < self.n_first:
            return f"{_NO_ANGLES}; give a budget of at least the {self.n_first} entries of a prompt"
        return super().lack(word, part)

    def position_ids(self, positions: Tensor) -> Tensor:
        """Positions of the condition, then rows and columns of the grid."""
        return self._place(super().position_ids(positions), self.n_first)

    def _place(self, positions: Tensor, lengths: Tensor | int) -> Tensor:
        """Position ids of positions `[R, W]` behind prompts of these lengths."""
        slots = positions - lengths  # of the image, in its own columns; `GridRotary` counts SIDE
        grid = self.n_first + slots // self.side * SIDE + slots % self.side
        return torch.where(slots < 0, positions, grid)


class LlamaGenTextWindow(LlamaGenWindow):
    """LlamaGen for texts, whose features stand for a prompt's placeholder ids, if there is one."""

    row_inputs = ("_conditions", "_lengths")

    def lack(self, word: str, part: Any = None) -> str:
        if word == "mixed passes":
            return "each entry of such a pass would have a copy of its row's text features"
        return super().lack(word, part)

    def __init__(
        self, model: Any, side: int, attention: Literal["auto", "model", "kernel"] = "auto"
    ) -> None:
        super().__init__(model, side, attention)
        self._conditions: Tensor | None = None  # [R, T, dim]
        self._lengths: Tensor | None = None  # [R], of the conditions

    def begin(self, features: Tensor, lengths: Tensor, guided: bool) -> Prompt:
        """Set text features `[B, T, width]` of the next run, padded on the right to `n_first`, and
        lengths `[B]`; if guided, unconditional rows of the same lengths follow.
        """
        condition = self.model.condition
        features = features.to(self.device, self.model.dtype)
        lengths = lengths.to(self.device)
        if guided:  # of the unconditional features the last ones, as behind padding on the left
            nothing = condition.unconditional
            index = torch.arange(len(nothing), device=self.device) - lengths[:, None]  # [B, T]
            features = torch.cat([features, nothing[index]])
            lengths = lengths.repeat(2)
        self._conditions, self._lengths = condition(features), lengths
        ids = torch.zeros(features.shape[:2], dtype=torch.int64, device=self.device)
        return Prompt(ids, lengths, 2 if guided else 1)

    def position_ids(self, positions: Tensor) -> Tensor:
        lengths: Tensor | int = 0 if self._lengths is None else self._lengths[:, None]
        return self._place(CausalLMWindow.position_ids(self, positions), lengths)

    def compute(self, **inputs: Any) -> Any:
        embedded = self.model.get_input_embeddings()(inputs.pop("input_ids"))
        conditions = self._conditions
        if conditions is not None:
            positions = inputs["position_ids"]
            at = positions.reshape(len(conditions), -1, 1).clamp(max=self.n_first - 1)
            first = conditions.gather(1, at.expand(-1, -1, conditions.shape[2]))
            is_first = (positions < self.n_first)[..., None]
            embedded = torch.where(is_first, first.view_as(embedded), embedded)
        return super().compute(inputs_embeds=embedded, **inputs)


def load_transformer(
    weights: Mapping[str, Tensor],
    *,
    n_head: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Any:
    """A `LlamaForCausalLM` of a published transformer; `n_head` is by default its width's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size, dim = shape_of(weights, "tok_embeddings.weight", 2)
    heads = _HEADS.get(dim) if n_head is None else n_head
    if heads is None:
        raise OptionError(
            f"n_head: expected the number of heads for width {dim}, received none; published "
            f"widths are {', '.join(map(str, _HEADS))}"
        )
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=dim,
        intermediate_size=shape_of(weights, "layers.0.feed_forward.w1.weight", 2)[0],
        num_hidden_layers=count_layers(weights),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        rms_norm_eps=1e-5,
        max_position_embeddings=SIDE**2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    n_first = 1
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
        if _CLASSES in weights:
            n_labels = shape_of(weights, _CLASSES, 2)[0]
            model.model.embed_tokens = nn.Embedding(vocab_size + n_labels, dim)
        else:
            n_first, width = shape_of(weights, "cls_embedding.uncond_embedding", 2)
            model.condition = TextCondition(n_first, width, dim)
    fill(model, _convert(weights, heads))
    model.model.rotary_emb = GridRotary(dim // heads, n_first)
    return move_module(model, device, dtype).eval().requires_grad_(False)


def _convert(weights: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The tensors under transformers' names, those of queries and keys in its order of channels."""
    tensors = rename(weights, _LAYER, _OUTER)
    for name in [name for name in tensors if name.endswith(_MIXED)]:
        if len(tensors[name]) % (6 * heads) != 0:
            continue
        attention = f"model.{name.removesuffix(_MIXED)}self_attn"
        for letter, weight in zip("qkv", tensors.pop(name).chunk(3), strict=True):
            if letter != "v":  # pairs of neighbours to pairs of halves
                weight = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
            # a copy, and not a view that keeps all three
            tensors[f"{attention}.{letter}_proj.weight"] = weight.clone()
    tokens = weights["tok_embeddings.weight"]
    if _CLASSES in weights and weights[_CLASSES].shape[1:] == tokens.shape[1:]:
        tensors["model.embed_tokens.weight"] = torch.cat([tokens, tensors.pop(_CLASSES)])
    return tensors
