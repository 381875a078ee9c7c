"""LlamaGen as a `TokenModel`: each row has its condition first, then image tokens.

A text of fewer features than the model has positions for is cached without padding: its features
have no angles, wherever they stand, and an image token's angle is that of its slot. So all rows
attend to what stands before them, and no pass needs a mask of its own.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from mmaccel.capabilities import GLOSSARY
from mmaccel.contracts import Pass, Prompt, Route
from mmaccel.errors import OptionError
from mmaccel.kernels import dispatch
from mmaccel.kernels.window_attention import window_attention
from mmaccel.pipelines.causal_lm.compatibility import check_attention, find_device
from mmaccel.pipelines.causal_lm.self_check import refuse_own_attention
from mmaccel.pipelines.layers.attention import find_ancestors
from mmaccel.pipelines.layers.store import KVCacheLayout, WindowLayer
from mmaccel.pipelines.layers.stores import LayerStores
from mmaccel.pipelines.models.llamagen.transformer import LlamaGenTransformer, make_rotations
from mmaccel.pipelines.runner.static_buffers import StaticModelBuffers
from mmaccel.samplers.drafting.states import StateModel

_LACKS = {
    "hidden states": "its layers hand out no hidden states; leave scorer out",
    "packed entries": "its cache stays as it is after the prompt",
    "prompt blocks": "its prompt is a condition, and such methods are for long prompts",
    "turned keys": "its positions are those of a grid; leave rerotate out",
}


class LlamaGenWindow(StaticModelBuffers, StateModel):
    """Wraps a LlamaGen transformer that is in evaluation mode.

    Args:
        model: the transformer.
        attention: as in `mmaccel.pipelines.causal_lm.model.CausalLMWindow`.

    Attributes:
        attention_reason: reason why passes have masks, set by `reserve`; empty if they have none.
        methods: what is done to the caches and the attention of its layers.

    Raises:
        OptionError: another attention.
    """

    offers = frozenset(GLOSSARY) - {
        "draft canvas", "fused decoder", "layer states", "mixed passes", "shared prompts",
    }  # fmt: skip
    max_positions: int
    row_inputs = ("_conditions", "_lengths")
    constants = ("_rotations",)

    def __init__(
        self, model: LlamaGenTransformer, attention: Literal["auto", "model", "kernel"] = "auto"
    ) -> None:
        check_attention(attention)
        self.attention = attention
        self.attention_reason = "nothing is reserved"
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.max_positions = model.config.cls_token_num + model.config.block_size
        self._rotations = make_rotations(model.config).to(self.device)
        self._conditions: Tensor | None = None
        self._lengths: Tensor | None = None  # [R], of the conditions
        self.keeps_states = False
        self.codes: Tensor | None = None  # [V, D], of the image tokenizer

    def vectors(self, kind: str) -> Tensor | None:
        return self.codes if kind == "codes" else None

    @property
    def route(self) -> Route:
        return Route(attention=self.attention_reason)

    @property
    def device(self) -> torch.device:
        """Where the model takes its tokens."""
        return find_device(self.model)

    def condition(self, labels: Tensor, guided: bool) -> Prompt:
        """Set the class labels of the next run.

        Args:
            labels: `[B]` int64 in 0..num_classes-1.
            guided: whether unconditional rows follow.
        """
        rows = torch.cat(
            [labels, torch.full_like(labels, self.model.config.num_classes)] if guided else [labels]
        )
        ones = torch.ones_like(rows)
        return self._set(self.model.cls_embedding(rows.to(self.device)), ones, guided)

    def condition_on_text(self, features: Tensor, lengths: Tensor, guided: bool) -> Prompt:
        """Set the text features of the next run.

        Args:
            features: `[B, T, caption_dim]` from T5, T is `cls_token_num`; padding on the right.
            lengths: `[B]` int64, features of each row.
            guided: whether unconditional rows follow; each has the length of its conditional row.
        """
        embedding: Any = self.model.cls_embedding
        features = features.to(self.device, self.model.output.weight.dtype)
        lengths = lengths.to(self.device)
        if guided:  # of the unconditional features the last ones, as behind padding on the left
            nothing = embedding.uncond_embedding
            index = torch.arange(len(nothing), device=self.device) - lengths[:, None]  # [B, T]
            features = torch.cat([features, nothing[index]])
            lengths = lengths.repeat(2)
        return self._set(embedding(features), lengths, guided)

    def reserve(self, rows: int, positions: int) -> None:
        """See `mmaccel.contracts.TokenModel.reserve`.

        Raises:
            OptionError: more positions than the model has.
        """
        if positions > self.max_positions:
            raise OptionError(
                f"positions: expected at most {self.max_positions}, received {positions}; "
                "ask for one image"
            )
        self._rotations = self._rotations.to(self.device)  # the model may have been moved
        setup = self.setup
        layout = KVCacheLayout(rows, positions + setup.spare + 1)
        self.attention_reason = self._find_reason(rows, positions + setup.spare + 1)
        if self.attention != "model":
            refuse_own_attention(self.model, self.attention_reason)
        layers = [WindowLayer(layout) for _ in self.model.layers]
        self.caches = LayerStores(
            layers, layout, self.methods, self.branches, drafts=setup.drafts,
            reads_back=self.reads_back,
        )  # fmt: skip

    def forward(self, entries: Pass) -> Tensor:
        stores = self.run_caches()
        by_kernel = not self.attention_reason
        hidden = self._pass(entries, by_kernel=by_kernel, sparse=stores.find_chooser())
        if self.keeps_states:
            self.last_states = hidden
        logits: Tensor = self.model.output(hidden)
        return logits.float()

    def forward_draft(self, entries: Pass, index: int) -> Tensor:
        chooser = self.run_caches().find_chooser(index)
        by_kernel = not self.attention_reason
        hidden = self._pass(entries, by_kernel=by_kernel, sparse=chooser)
        logits: Tensor = self.model.output(hidden)
        return logits.float()

    def keep_states(self, wanted: bool) -> None:
        self.keeps_states = wanted

    def output_matrix(self) -> Tensor:
        return self.model.output.weight

    def lack(self, word: str, part: Any = None) -> str:
        """See `mmaccel.capabilities.Capable`."""
        n_first = self.model.config.cls_token_num
        if word == "eviction" and n_first == 1:  # which the first window processes
            return "its prompt is one class label, of which nothing can be evicted"
        if word == "prompt keys" and part.every is None:
            return (
                "the queries and keys of its prompt are zero; give every, by which entries of the "
                "image go"
            )
        if word == "prompt keys" and part.budget < n_first:
            return (
                "the queries and keys of its prompt are zero; give a budget of at least the "
                f"{n_first} entries of a prompt"
            )
        return _LACKS.get(word, "") or super().lack(word, part)

    def prefill(self, entries: Pass) -> None:
        stores = self.run_caches()
        lengths = entries.lengths
        if lengths is None:  # rows are admitted
            self._pass(entries)
            return
        self._pass(entries, watcher=stores.observe_part(lengths, entries.tokens.shape[1]))
        stores.end_part()

    @torch.no_grad()
    def _pass(self, entries: Pass, **options: Any) -> Tensor:
        """Hidden states `[R, W, dim]` of a pass; options are fields of `WindowPass`."""
        tokens = entries.tokens
        start = entries.start
        conditions = self._conditions
        lengths = self._lengths
        assert start is not None and conditions is not None and lengths is not None
        indices = start[:, None] + torch.arange(tokens.shape[1], device=start.device)  # [R, W]
        tree = None if entries.parents is None else find_ancestors(entries.parents)
        stores = self.run_caches()
        this = stores.open_pass(indices, tree=tree, ragged=self.setup.ragged, **options)
        # entries of one depth of a tree share a position
        positions = indices if tree is None else start[:, None] + tree.sum(-1) - 1
        is_first = positions < lengths[:, None]
        n_first = conditions.shape[1]
        at = positions.clamp(max=n_first - 1)[..., None].expand(-1, -1, conditions.shape[2])
        embedded = self.model.tok_embeddings(tokens.masked_fill(is_first, 0))
        hidden = torch.where(is_first[..., None], conditions.gather(1, at), embedded)
        slots = (positions - lengths[:, None]).clamp(min=-1, max=self.model.config.block_size - 1)
        return self.model(hidden, self._rotations[n_first + slots][:, None], this)

    def _find_reason(self, rows: int, cache_size: int) -> str:
        """Reason why passes have masks; empty if they need none."""
        if self.attention == "model":
            return "attention='model'"
        if self.attention == "kernel":
            return ""
        if self.device.type != "cuda" and dispatch.mode() != "triton":
            return f"the model is on {self.device}"
        weight = self.model.output.weight
        config = self.model.config
        shape = (rows, config.n_head, cache_size, config.dim // config.n_head)
        keys = weight.new_zeros(1, 1, 1, shape[-1]).expand(shape)
        start = torch.zeros(rows, dtype=torch.int64, device=self.device)
        choice = dispatch.decide(window_attention, keys[:, :, :1], keys, keys, start, scale=1.0)
        return "" if choice.backend == "triton" else choice.reason

    def _set(self, conditions: Tensor, lengths: Tensor, guided: bool) -> Prompt:
        """Store embedded conditions `[R, T, dim]`; return a prompt with placeholder ids."""
        self._conditions, self._lengths = conditions, lengths.to(self.device)
        ids = torch.zeros(conditions.shape[:2], dtype=torch.int64, device=self.device)
        return Prompt(ids, self._lengths, 2 if guided else 1)
