"""A draft model that has a part of the target's vocabulary, as a `TokenModel` over all of it.

Departures: an id that the draft model does not know is read as one that it knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.checks import check_int
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.causal_lm.compatibility import name_head, take_rows
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.samplers.drafting.shared_ids import read_ids, spread_logits


class SharedIdsWindow(CausalLMWindow):
    """A draft model over the target's ids.

    Args:
        vocab_size: V, of the target.
        reads: `[V]` int64, the model's id of each of the target's, then ids that it alone has (a
            mask's).
        rows: `[K]` int64, ids of the model whose logits are computed.
        ids: `[K]` int64, the target's ids of these; the others have no probability.
    """

    offers = CausalLMWindow.offers - {"fused decoder"}

    def __init__(
        self, model: Any, vocab_size: int, *, reads: Tensor, rows: Tensor, ids: Tensor
    ) -> None:
        super().__init__(model)
        self.vocab_size = vocab_size
        self._reads = reads.to(self.device)
        self._rows = rows.to(self.device)
        self._ids = ids.to(self.device)
        self._head_rows: dict[str, Tensor] = {}  # weight and bias, by name, of the run

    def lack(self, word: str, part: Any = None) -> str:
        if word == "fused decoder":
            return "the fused decoder has the whole head"
        return super().lack(word, part)

    @property
    def n_inputs(self) -> int:
        return len(self._reads)

    def reserve(self, rows: int, positions: int) -> None:
        """Cost: a copy of the rows of the head."""
        super().reserve(rows, positions)
        device = self.device  # the model may have moved since
        self._reads = self._reads.to(device)
        self._rows = self._rows.to(device)
        self._ids = self._ids.to(device)
        with torch.no_grad():
            name = name_head(self.model, len(self._rows), self.facts.n_ids)
            self._head_rows = take_rows(self.model, name, self._rows)

    def replaced_tensors(self) -> dict[str, Tensor]:
        return self._head_rows

    def compute(self, **inputs: Any) -> Any:
        if "input_ids" in inputs:
            inputs["input_ids"] = self._reads[inputs["input_ids"]]
        output = super().compute(**inputs)
        known = output.logits if self._head_rows else output.logits[..., self._rows]
        output.logits = spread_logits(known, self._ids, self.vocab_size)
        return output


def trim_vocabulary(model: Any, ids: Any) -> SharedIdsWindow:
    """A draft model that says some of its ids alone, and reads all: VocabTrim, FR-Spec.

    >>> small = mmaccel.trim_vocabulary(small, mmaccel.frequent_ids(texts, 8192))
    >>> policy = mmaccel.Speculative(window=8, draft_model=small)

    Args:
        model: a causal LM of transformers with the target's vocabulary.
        ids: which ones, no id twice: numbers, or a file of them.
    """
    n_ids = CausalLMWindow(model).vocab_size
    kept = read_ids(ids, n_ids)
    return SharedIdsWindow(model, n_ids, reads=torch.arange(n_ids), rows=kept, ids=kept)


def share_ids(model: Any, vocab_size: int, ids: Any = None, unknown: int = 0) -> SharedIdsWindow:
    """A draft model with another vocabulary, as one over the target's.

    Args:
        model: a causal LM of transformers.
        vocab_size: V, of the target; `model.config.vocab_size` of that model.
        ids: the target's id of each of the draft model's. None: the ids that both have are the same
            tokens, as in one family whose tables were padded differently.
        unknown: the draft model's id that it reads in place of one that it does not know.

    Raises:
        OptionError: a number of ids that is not the draft model's, ids outside the target's, or
            an id twice.
        UnsupportedModelError: no causal LM, or a file that cannot be read.
    """
    n_ids = CausalLMWindow(model).vocab_size
    check_int("vocab_size", vocab_size, 1, hint="it is the target's")
    check_int("unknown", unknown, 0, n_ids - 1, hint="it is an id of the draft model")
    shared = torch.arange(min(n_ids, vocab_size)) if ids is None else read_ids(ids, vocab_size)
    if ids is not None and len(shared) != n_ids:
        raise OptionError(
            f"ids: expected one of each of the draft model's {n_ids} ids, received {len(shared)}; "
            "take the map of this draft model"
        )
    rows = torch.arange(len(shared))
    reads = torch.full((vocab_size,), unknown, dtype=torch.int64).index_copy(0, shared, rows)
    if ids is None:
        reads = torch.cat([reads, torch.arange(vocab_size, max(vocab_size, n_ids))])
    return SharedIdsWindow(model, vocab_size, reads=reads, rows=rows, ids=shared)
