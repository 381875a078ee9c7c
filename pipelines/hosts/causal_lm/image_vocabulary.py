"""A causal LM whose vocabulary holds image tokens, as a model of those tokens alone.

Chameleon, Emu3 and others predict text and images with one head; after a prompt only image tokens
occur, and those that close rows of the grid. Samplers see these alone: image tokens by their ids,
then the structural ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmaccel.contracts import Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.compatibility import read_weight
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow, select_kept
from mmaccel.pipelines.hosts.causal_lm.route import run_body


class ImageTokenWindow(CausalLMWindow):
    """Text ids in a row's prompt, image tokens after it; logits of image tokens.

    Args:
        model: a transformers model that has its body in `model` and a head on top.
        ids: N ids of image tokens in the model's vocabulary, ascending.
        structural: S ids of tokens that a layout forces; their logits are 0.
    """

    own_vocabulary = True
    row_inputs = ("_lengths",)
    follows_tokens = True  # in a prompt all tokens are before its length
    constants = ("ids", "_weight", "_bias")
    options = (*CausalLMWindow.options, "_n_structural")
    needs_head = False

    def __init__(self, model: Any, ids: Sequence[int], structural: Sequence[int] = ()) -> None:
        super().__init__(model)
        self._every_id = [*ids, *structural]
        self.vocab_size = len(self._every_id)
        self._n_structural = len(structural)
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):  # rows of an adapter's head are not taken apart
            raise UnsupportedModelError(
                f"model: expected a plain linear head, received a {type(head).__name__}; "
                "merge the adapter, and leave the head unquantised"
            )
        self._lengths: Tensor | None = None
        self._read_head()

    def _read_head(self) -> None:
        head = self.model.get_output_embeddings()
        self.ids = torch.tensor(self._every_id, device=self.device, dtype=torch.int64)  # [N + S]
        n_images = self.vocab_size - self._n_structural
        rows: Any = self._every_id[:n_images]
        first = rows[0]
        if rows == list(range(first, first + n_images)):
            rows = slice(first, first + n_images)  # a view
        # a copy where a device map has the head elsewhere
        self._weight: Tensor | None = read_weight(head)[rows].to(self.device)
        self._bias = None if head.bias is None else head.bias[rows].to(self.device)
        self._matrix: Tensor | None = None

    def moved(self) -> None:
        super().moved()
        self.ids = self.ids.to(self.device)
        self._weight = self._bias = self._matrix = None  # `begin` takes the rows anew

    def output_matrix(self) -> Tensor:
        if self._matrix is None:
            assert self._weight is not None, "begin comes first"
            self._matrix = F.pad(self._weight, (0, 0, 0, self._n_structural))  # structural: zeros
        return self._matrix

    def vectors(self, kind: str) -> Tensor | None:
        if kind == "codes":
            return self.codes
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.to(self.device)[self.ids]

    def begin(self, prompt: Prompt) -> Prompt:
        """Set the prompt of the next run, whose ids are the model's own; returns it."""
        if self._weight is None:
            self._read_head()
        self._lengths = prompt.lengths
        return prompt

    def compute(self, **inputs: Any) -> Any:
        assert self._lengths is not None and self._weight is not None, "begin comes first"
        tokens = inputs["input_ids"]
        kept = inputs.pop("logits_to_keep", 0)
        is_text = inputs["position_ids"] < self._lengths.view(len(tokens), -1)  # [R, W]
        images = self.ids[tokens.clamp(max=self.vocab_size - 1)]  # ids of text may be larger
        inputs["input_ids"] = torch.where(is_text, tokens, images)
        hidden = select_kept(run_body(self, self.model.model, inputs), kept)
        hidden = hidden.to(self.ids.device)
        if self.keeps_states:
            self.last_states = hidden
        logits = F.linear(hidden, self._weight, self._bias)
        if self._n_structural:  # torch copies to pad nothing as well
            logits = F.pad(logits, (0, self._n_structural))
        return SimpleNamespace(logits=logits)
