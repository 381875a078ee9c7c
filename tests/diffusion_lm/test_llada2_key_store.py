"""Masks and places of passes over a store, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmaccel.errors import ShapeError, UnsupportedModelError
from mmaccel.pipelines.diffusion_lm.llada2.block_masks import FORMS, make_form, make_reads
from mmaccel.pipelines.diffusion_lm.llada2.kv_cache import CachedModel


class Recorder(nn.Module):
    """Writes every entry's number as its key, and keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(num_hidden_layers=1)
        self.given: list[dict[str, Any]] = []
        self.keys = torch.empty(0)

    def forward(self, ids: Tensor, **options: Any) -> Any:
        self.given.append(options)
        states = ids[:, None, :, None].float()
        self.keys, _ = options["past_key_values"].update(states, states, 0)
        return SimpleNamespace(logits=ids[..., None].float())


def test_entries_are_written_at_their_places_and_rows_may_be_fewer() -> None:
    model = Recorder()
    calls = CachedModel(model, model)
    calls.reserve(3, 6)
    ids = torch.tensor([[1, 2], [3, 4], [5, 6]])
    places = torch.tensor([[0, 4], [1, 0], [2, 3]])
    reads = torch.ones(3, 1, 5, dtype=torch.bool)
    calls.run(ids, ids, places, reads)
    assert model.keys[:, 0, :, 0].tolist() == [[1, 0, 0, 0, 2], [4, 3, 0, 0, 0], [0, 0, 5, 6, 0]]
    calls.run(ids[:1, :1] + 6, ids[:1, :1], places[:1, 1:], reads[:1])
    assert model.keys[:, 0, :, 0].tolist() == [[1, 0, 0, 0, 7]]
    assert model.given[1]["past_key_values"].get_seq_length() == 4


def test_an_entry_that_looks_at_nothing_is_shown_itself() -> None:
    model = Recorder()
    calls = CachedModel(model, model, "bool")
    calls.reserve(1, 4)
    reads = torch.tensor([[[False] * 4, [True, False, False, False]]])
    calls.run(torch.tensor([[5, 6]]), torch.tensor([[0, 1]]), torch.tensor([[2, 3]]), reads)
    assert model.given[0]["attention_mask"][0, 0].tolist() == [
        [False, False, True, False],
        [True, False, False, False],
    ]


def test_forms_of_a_mask() -> None:
    reads = torch.tensor([[[True, False]]])
    made = {form: make_form(reads, form, torch.float16)[0, 0, 0].tolist() for form in FORMS}
    assert made["bool"] == [True, False] and made["zero-one"] == [1.0, 0.0]
    assert made["additive"] == [0.0, torch.finfo(torch.float16).min]


def test_what_blocks_and_causal_entries_look_at() -> None:
    visible = torch.tensor([[0, 1, 1, 1, 1]])
    blocks = make_reads(visible, 2, 5, 2, "blocks")[0].int().tolist()
    assert blocks == [[0, 1, 1, 1, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1]]
    causal = make_reads(visible, 2, 4, 2, "causal")[0].int().tolist()
    assert causal == [[0, 1, 1, 0], [0, 1, 1, 1]]


def test_a_model_without_layers_and_keys_of_another_width_are_refused() -> None:
    model = Recorder()
    calls = CachedModel(model, lambda ids, **options: model(ids[:, :1], **options))
    calls.reserve(1, 4)
    ids = torch.tensor([[5, 6]])
    with pytest.raises(ShapeError, match="expected keys of 1 rows at the places"):
        calls.run(ids, ids, ids - 5, torch.ones(1, 1, 4, dtype=torch.bool))
    model.config = SimpleNamespace()
    with pytest.raises(UnsupportedModelError, match="num_hidden_layers"):
        CachedModel(model, model)
