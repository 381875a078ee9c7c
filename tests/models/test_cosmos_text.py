"""Cosmos' Video2World models: the published transformer's logits under a text, and whole clips."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import ImageToVideo, Jacobi, SpeculativeJacobi
from mmaccel.contracts import Pass
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
from mmaccel.pipelines.hosts.runner.engine import Engine
from mmaccel.pipelines.models.llamagen.text_to_image import find_t5
from tests.fixtures.graph_replay import Replay
from tests.fixtures.media import image
from tests.fixtures.shared import reading_folders, reading_pipe
from tests.fixtures.video import (
    CONTEXT,
    LENGTH,
    SHAPE,
    VOCAB,
    YARN,
    Transformer,
    build_text_encoder,
    build_video,
    clip_turns,
)

FRAME = SHAPE[1] * SHAPE[2]
PROMPT = "a red fox in the snow"


def features_of(prompt: str) -> Tensor:
    """As the authors encode: padded to 512 tokens, and zeros behind the text."""
    video: Any = reading_pipe().video
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    own = video.words(prompt)["input_ids"]
    ids[0, : len(own)] = torch.tensor(own)
    mask = (torch.arange(LENGTH) < len(own))[None]
    with torch.no_grad():
        made = video.text_encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state[0]
    return made * mask[0, :, None]


@pytest.mark.parametrize("config", [{}, YARN])
def test_logits_are_those_of_the_published_transformer(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    model, codec = build_video(tmp_path, reads_text=True, **config)
    made = ImageToVideo.from_pretrained(model, codec=codec, text_encoder=reading_folders()[2])
    window: Any = made.model
    generator = torch.Generator().manual_seed(0)
    tokens = torch.cat((torch.tensor([VOCAB]), torch.randint(0, VOCAB, (18,), generator=generator)))
    text = torch.zeros(LENGTH, CONTEXT)
    text[:5] = torch.randn(5, CONTEXT, generator=generator)
    plain = Transformer(config or None, reads_text=True)
    for shown in (text[:5], text):  # what follows a text is zeros
        window.read(shown)
        window.reserve(1, 19)
        got = window.forward(Pass(tokens[None], torch.zeros(1, dtype=torch.int64)))[0]
        torch.testing.assert_close(got, plain(tokens, text), rtol=0, atol=2e-5)
    others = (plain(tokens, text[:1].expand(LENGTH, -1)), plain(tokens, text * 0))
    assert all(float((got - other).abs().max()) > 1e-3 for other in others)
    assert window.max_positions == 19 and len(clip_turns(20)) == 18


def test_greedy_tokens_are_a_plain_loops_under_the_text() -> None:
    plain, text = Transformer(reads_text=True), features_of(PROMPT)
    clip = reading_pipe()(image(), prompt=PROMPT, temperature=0, policy=Jacobi(window=5))[0]
    tokens = torch.cat((torch.tensor([VOCAB]), clip.tokens.flatten()[:FRAME]))
    while len(tokens) <= 3 * FRAME:
        tokens = torch.cat((tokens, plain(tokens, text)[-1].argmax()[None]))
    assert torch.equal(clip.tokens.flatten(), tokens[1:])
    assert clip.prompt == PROMPT and clip.passes < 2 * FRAME


def test_the_frame_before_is_a_draft_and_the_first_token_is_none_of_it() -> None:
    policy = Jacobi(window=6, drafts="previous-frame")
    made = reading_pipe()(image(), prompt=PROMPT, seed=1, policy=policy)
    plain = reading_pipe()(image(), prompt=PROMPT, seed=1, policy=Jacobi(window=1))
    assert torch.equal(made[0].tokens, plain[0].tokens)
    sampled = reading_pipe()(image(), prompt=PROMPT, policy=SpeculativeJacobi(window=8))
    assert int(sampled[0].tokens.max()) < VOCAB


def test_copies_in_other_dtypes_read_texts() -> None:
    assert list(reading_pipe().components) == ["text_encoder", "model", "codec"]
    short = copy.deepcopy(reading_pipe()).to(torch.bfloat16)
    clip = short(image(), prompt=PROMPT, seed=2)[0]
    assert clip.tokens.shape == SHAPE and short.components["text_encoder"].dtype == torch.bfloat16


def test_a_whole_t5_is_read_for_its_encoder(tmp_path: Path) -> None:
    """As flan-t5-xl is published, with a decoder and a head that is no copy of the embedding."""
    build_text_encoder(tmp_path / "flan-t5-xl")
    words, encoder = find_t5(tmp_path, LoadConfig())
    assert type(encoder).__name__ == "T5EncoderModel" and words(PROMPT)["input_ids"]


@pytest.mark.slow
def test_captured_steps_read_the_text_of_their_call(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = (PROMPT, "a blue fox", PROMPT)
    wanted = [reading_pipe()(image(), prompt=prompt, seed=5)[0].tokens for prompt in prompts]
    pipe = copy.deepcopy(reading_pipe())
    runners: list[Replay] = []

    def open_runner(self: Engine, window: Any, *others: Any) -> Replay:
        runners.append(Replay(self.sync_every, self.cache))
        return runners[-1]

    monkeypatch.setattr(Engine, "runner", open_runner)
    for prompt, tokens in zip(prompts, wanted):
        assert torch.equal(pipe(image(), prompt=prompt, seed=5)[0].tokens, tokens)
    assert sum(runner.replayed for runner in runners) > 3 and len(runners) == 3
    assert not torch.equal(wanted[0], wanted[1])
