"""Higgs Audio v2: a prompt of text and sound, delays, ends step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmaccel
from tests.delay.hosts import (
    IDS,
    VOICE,
    WIDE,
    assert_same_distribution,
    is_refused,
    make_higgs_host,
    open_host,
)
from tests.delay.models import (
    AUDIO,
    AUDIO_BEGIN,
    AUDIO_DELAY,
    HIGGS_BOOKS,
    HIGGS_END,
    TEXT_END,
    make_higgs,
)
from tests.fixtures.tiny_lms import falls_back


def test_rows_end_at_steps_of_their_own() -> None:
    """What other tests compare has a row that ends, book after book, and one that does not."""
    ends = open_host("higgs").call() == HIGGS_END
    assert not ends[0].any() and ends[1, -1].all()
    first = ends[1].long().argmax(0)
    assert torch.equal(first[1:] >= first[:-1], torch.ones(HIGGS_BOOKS - 1, dtype=torch.bool))


def test_several_sounds_of_a_text() -> None:
    """Of the likeliest code alone they are the model's own; else those of a row for each."""
    host, policy = open_host("higgs"), WIDE
    options = {"do_sample": True, "num_return_sequences": 2}
    own = host.call(**options, top_k=1)
    assert len(own) == 2 * len(IDS)
    assert torch.equal(host.attached(policy, **options, top_k=1)[0], own)
    made, _ = host.attached(policy, seed=[5, 6, 7, 8], **options)
    each = IDS.repeat_interleave(2, 0)
    rows = {"input_ids": each, "attention_mask": each != IDS[0, 0], "do_sample": True}
    assert torch.equal(host.attached(policy, seed=[5, 6, 7, 8], **rows)[0], made)
    assert not torch.equal(made[0], made[1])


def _prompt(*ids: int) -> dict[str, Any]:
    return {"input_ids": torch.tensor([ids]), "attention_mask": None}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "a short prompt": (_prompt(3, AUDIO_BEGIN), "fewer ids than codebooks"),
    "repaired scores": ({"remove_invalid_values": True}, "other than temperature"),
    "another end": ({"eos_token_id": 2}, f"end tokens without {TEXT_END}"),
    "one step": ({"max_new_tokens": 1}, "nothing is generated"),
    "holes": ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]] * 2)}, "attention mask"),
    "a sound that ends": (_prompt(3, AUDIO, AUDIO_DELAY), "begun to end"),
    "rows that began apart": (
        {"input_ids": torch.tensor([[3, AUDIO_BEGIN, 4], [3, 4, AUDIO_BEGIN]]),
         "attention_mask": None},
        "begun at different steps",
    ),
    "a voice without its mask": (VOICE | {"audio_input_ids_mask": None}, "sound without its mask"),
    "a voice of one frame": (
        _prompt(3, 4, AUDIO, AUDIO_BEGIN)
        | {"audio_input_ids": torch.zeros(1, 1, HIGGS_BOOKS, dtype=torch.int64),
           "audio_input_ids_mask": torch.ones(1, 1, dtype=torch.bool)},
        "less than two frames of sound",
    ),
}  # fmt: skip


def test_a_call_that_falls_back_returns_what_it_returns_without_a_policy() -> None:
    """Codes `[B, S, K]`; rows end at steps of their own, with an id that is no code."""
    host, (options, says) = open_host("higgs"), REFUSED["repaired scores"]
    own = host.call(**options)
    with falls_back(host.model, says) as handle:
        made = host.call(**options)
    assert made.ndim == 3 and torch.equal(made, own) and handle.stats.passes > 0


def test_repetition_aware_sampling_is_refused() -> None:
    host = make_higgs_host()
    host.model.generation_config.ras_win_len = 7
    assert is_refused(host, "repetition-aware sampling")


def test_rotations_that_change_with_the_length_are_refused() -> None:
    model = make_higgs()
    model.config.rope_parameters["rope_type"] = "dynamic"
    assert "change with the length" in mmaccel.supports(model).reason


@pytest.mark.slow  # that of MusicGen's codes is in the fast lane
@pytest.mark.parametrize(
    ("codes", "options"),
    [(1, {"top_k": 0}), (3, {"top_k": 0, "top_p": 0.7})],
    ids=["plain", "top_p"],
)
def test_sounds_have_the_models_distribution(codes: int, options: dict[str, Any]) -> None:
    """Against the model's own scores, after all of its processors, along what it draws itself."""
    host = make_higgs_host(1.0, codes, 2)
    host.model.double()
    rows = 2000
    ids = IDS[1:, :].expand(rows, -1)
    options = options | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    options |= {"max_new_tokens": 4, "do_sample": True, "temperature": 1.5}
    torch.manual_seed(0)
    own = host.call(**options, return_dict_in_generate=True, output_scores=True)
    drawn = own.audio_sequences
    scores = torch.stack(own.scores, 1).double().softmax(-1)  # [B, S, K, V]
    chances = scores.gather(3, drawn[..., None])[..., 0]
    is_end = (drawn == codes + 1).all(2).long()
    over = is_end.cumsum(1) - is_end > 0  # [B, S]
    chances = chances.masked_fill(over[..., None], 1.0).flatten(1).prod(1)
    assert_same_distribution(host, options, drawn, chances)
