"""`TextToVideo`: tokens of a plain loop, frames of the tokenizer, given frames, seeds, batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmaccel
from mmaccel import Autoregressive, Jacobi, TextToVideo
from mmaccel.tokenizers_vq.autoencoder import load_tokenizer
from tests.fixtures.media import image
from tests.fixtures.tiny_model import FPS, N_CODES, N_FRAMES, N_TOKENS, build_tiny_clips

PROMPT = "a red circle on grass"
SHAPE, START = (N_FRAMES, 4, 4), image(0, (16, 16))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def pipe(folder: Path) -> TextToVideo:
    """One for all tests, which leave it as it was."""
    return TextToVideo.from_pretrained(folder)


def plain_tokens(pipe: TextToVideo, ids: list[int], count: int) -> list[int]:
    """The likeliest tokens after a prompt, one full pass each."""
    for _ in range(count):
        logits = pipe.model.model(torch.tensor([ids])).logits[0, -1, :N_CODES]
        ids = [*ids, int(logits.argmax())]
    return ids[-count:]


def test_greedy_tokens_are_a_plain_loops(pipe: TextToVideo) -> None:
    ids = pipe.clip_model.encode(PROMPT)
    wanted = plain_tokens(pipe, ids, N_FRAMES * N_TOKENS)
    clip = pipe(PROMPT, temperature=0, guidance_scale=1, policy=Jacobi(window=7))[0]
    assert clip.tokens.flatten().tolist() == wanted
    assert (clip.tokens.shape, clip.prompt, clip.fps, clip.n_given) == (SHAPE, PROMPT, FPS, 0)
    assert clip.passes < len(wanted)


def test_a_clip_is_drafted_from_its_previous_frames(pipe: TextToVideo) -> None:
    made = {
        drafts: pipe("a red circle", seed=4, policy=Jacobi(window=16, drafts=drafts)).stats
        for drafts in ("auto", "previous-frame", "neighbour")
    }
    assert made["auto"].drafts == "previous-frame"
    assert made["auto"].passes == made["previous-frame"].passes != made["neighbour"].passes


@pytest.mark.parametrize("drafts", ["previous-frame", "moved-frame"])
def test_windows_are_the_plain_loop_bit_for_bit(pipe: TextToVideo, drafts: str) -> None:
    texts = [PROMPT, "blue square"]
    plain = pipe(texts, seed=[4, 9], policy=Autoregressive())
    fast = pipe(texts, seed=[4, 9], policy=Jacobi(window=16, drafts=drafts))
    assert fast.stats.exactness == "bitwise" and fast.stats.passes < plain.stats.passes
    for one, other in zip(plain.clips, fast.clips, strict=True):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.frames, other.frames)


def test_a_clip_depends_on_its_seed_and_prompt_alone(pipe: TextToVideo) -> None:
    many = pipe([PROMPT, "blue square"], seed=2**64 - 1, num_videos_per_prompt=2, batch_size=2)
    assert [clip.seed for clip in many.clips] == [2**64 - 1, 0, 1, 2]
    assert many.stats.seed == 2**64 - 1
    assert [clip.prompt for clip in many.clips] == [PROMPT] * 2 + ["blue square"] * 2
    assert [clip.index for clip in many.clips] == [0, 1, 2, 3]
    alone = pipe("blue square", seed=1)[0]
    assert torch.equal(alone.tokens, many[2].tokens)
    assert not torch.equal(many[0].tokens, many[1].tokens)


def test_frames_are_the_tokenizers(pipe: TextToVideo, folder: Path) -> None:
    clip = pipe(PROMPT, seed=3)[0]
    assert (clip.frames.shape, clip.frames.dtype) == ((N_FRAMES, 16, 16, 3), torch.uint8)
    pixels = load_tokenizer(folder).decode(clip.tokens.flatten(1))
    assert torch.equal(clip.frames, (pixels * 255).round().byte().permute(0, 2, 3, 1))


def test_clips_begin_with_the_given_frames(pipe: TextToVideo, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    for n_given, start in ((1, START), (2, [START, image(1, START.size)])):
        pictures = start if isinstance(start, list) else [start]
        given = torch.stack([torch.from_numpy(np.array(each)) for each in pictures])
        tokens = tokenizer.encode(given.permute(0, 3, 1, 2).float() / 127.5 / 2)
        clip = pipe(PROMPT, start=start, temperature=0, guidance_scale=1)[0]
        assert clip.n_given == clip.n_read == n_given
        assert torch.equal(clip.tokens[:n_given].flatten(1), tokens)
        ids = [*pipe.clip_model.encode(PROMPT), *tokens.flatten().tolist()]
        wanted = plain_tokens(pipe, ids, (N_FRAMES - n_given) * N_TOKENS)
        assert clip.tokens[n_given:].flatten().tolist() == wanted
    assert pipe(PROMPT)[0].n_given == 0  # the pipeline itself is as before


def test_guidance_and_negatives_change_a_clip(pipe: TextToVideo) -> None:
    own = pipe(PROMPT, seed=5)[0]
    assert pipe.clip_model.params.guidance_scale == 2
    for other in ({"guidance_scale": 1.0}, {"negative_prompt": "blue"}, {"start": START}):
        assert not torch.equal(pipe(PROMPT, seed=5, **other)[0].tokens, own.tokens)
    named = pipe([PROMPT], seed=5, negative_prompt=["blue"], start=START)[0]
    assert not torch.equal(named.tokens, pipe(PROMPT, seed=5, start=START)[0].tokens)


def test_clips_are_delivered_as_they_end(pipe: TextToVideo) -> None:
    got: list[Any] = []
    made = pipe([PROMPT] * 3, seed=[1, 2, 3], batch_size=2, deliver=got.append)
    assert sorted(clip.index for clip in got) == [0, 1, 2]
    assert all(clip is made[clip.index] for clip in got)
    (frames,) = pipe(PROMPT, seed=1, return_dict=False)
    assert torch.equal(frames[0], made[0].frames)


def test_one_run_at_a_time_also_of_a_copy(pipe: TextToVideo) -> None:
    started = pipe.start_with(START)
    with pytest.raises(mmaccel.BusyError):
        pipe(PROMPT, on_step=lambda _: started(PROMPT))
    assert len(pipe(PROMPT)) == 1
