"""`TextToSpeech.stream`: the tokens of the whole, chunks that follow each other, and its sound.

Latency is counted in frames and passes. Weights are random, so that phases are found less alike
than those of speech, for which the codec declares -50 dB.
"""

from __future__ import annotations

import _thread
import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import Autoregressive, Jacobi, TextToSpeech
from mmaccel.errors import BusyError, NumericsError
from mmaccel.pipelines.text_to_speech.streaming import RowSound
from mmaccel.pipelines.text_to_speech.types import (
    SoundContext,
    SpeechChunk,
    SpeechRequest,
    Utterance,
)
from tests.fixtures.shared import media_pipe
from tests.fixtures.voices import build_codec, endless

CHUNK = 10  # frames
REACH = 18  # frames that the tiny codec reads to each side
HOP = 320  # samples of a frame
LONG: dict[str, Any] = dict(max_seconds=1.2)  # 60 frames, where the model does not end before
POLICIES = (Autoregressive(), Jacobi(window=6))
PARTS = "A red fox. Blue cat, a red fox a blue cat; seven"  # four


@pytest.fixture(name="endless")
def _endless(voices: TextToSpeech) -> Iterator[TextToSpeech]:
    """The same, which goes on until it is cut."""
    with endless(voices):
        yield voices


def stream(voices: TextToSpeech, text: str = "a red fox", **options: Any) -> tuple[Any, list[Any]]:
    """A stream that has ended, and its chunks."""
    made = voices.stream(text, **{"chunk_seconds": CHUNK / 50, **options})
    return made, list(made)


def join(chunks: list[SpeechChunk]) -> Tensor:
    """All sound; an utterance without words has none."""
    return torch.cat([torch.zeros(0), *(chunk.waveform for chunk in chunks)])


def assert_follow(chunks: list[SpeechChunk], whole: Utterance, frames: int | None = CHUNK) -> None:
    """Each chunk begins where the one before ends, and the last one ends where the whole does."""
    n = 0
    for chunk in chunks:
        assert chunk.start == n / chunk.sample_rate and chunk.sample_rate == whole.sample_rate
        n += len(chunk.waveform)
    assert n == len(whole.waveform)
    if frames is not None:
        assert {len(chunk.waveform) for chunk in chunks[:-1]} <= {frames * HOP}


def assert_like(chunks: list[SpeechChunk], whole: Utterance, most: float) -> None:
    """No stretch of 20 ms differs by more than `most` dB of the utterance's power."""
    assert_follow(chunks, whole, frames=None)
    error = (join(chunks) - whole.waveform).square().view(-1, HOP).mean(1).max()
    assert 10 * (error / whole.waveform.square().mean()).log10() < most


@pytest.mark.parametrize("seed", [3, 4])
def test_tokens_are_those_of_the_whole(voices: TextToSpeech, seed: int) -> None:
    """Utterances that the model ends, after a few frames or before a chunk is whole."""
    whole = voices("a red fox", seed=seed, **LONG)[0]
    made = [stream(voices, seed=seed, policy=policy, **LONG) for policy in POLICIES]
    for each, chunks in made:
        said = each.utterance
        assert torch.equal(said.tokens, whole.tokens) and said.is_finished == whole.is_finished
        assert (said.text, said.seed, said.voice) == (whole.text, whole.seed, whole.voice)
        assert_follow(chunks, whole)
        assert torch.equal(said.waveform, join(chunks))
    assert torch.equal(made[0][0].utterance.waveform, made[1][0].utterance.waveform)


@pytest.mark.parametrize("policy", POLICIES, ids=["plain", "window"])
def test_a_chunk_comes_when_its_surroundings_are_there(endless: TextToSpeech, policy: Any) -> None:
    lengths: list[int] = []
    made, chunks = stream(
        endless, seed=5, policy=policy, **LONG, on_step=lambda p: lengths.append(int(p.lengths[0]))
    )
    whole = endless("a red fox", seed=5, **LONG)[0]
    assert torch.equal(made.utterance.tokens, whole.tokens) and len(whole.tokens) == 60
    assert_follow(chunks, whole)
    assert_like(chunks, whole, -30)
    needed = [min((k + 1) * CHUNK + REACH, 60) for k in range(6)]
    came = [next(k for k, n in enumerate(lengths, 1) if n >= frames) for frames in needed]
    assert [chunk.passes for chunk in chunks] == came
    if policy == Autoregressive():
        assert came[:4] == needed[:4]  # a frame a pass
    else:
        assert came[0] < needed[0]


def test_chunks_are_whole_steps_and_may_be_longer_than_the_utterance(endless: TextToSpeech) -> None:
    whole = endless("a red fox", seed=5, max_seconds=0.3)[0]
    for seconds, frames in ((0.061, 4), (9.0, 450)):
        chunks = stream(endless, seed=5, max_seconds=0.3, chunk_seconds=seconds)[1]
        assert_follow(chunks, whole, frames)
        assert len(chunks) == -(-15 // frames)


def test_sound_of_the_codec_depends_on_frames_within_its_reach() -> None:
    """Of the embedded codec: magnitudes exactly within the convolutions' part, phases nearly."""
    codec = build_codec()
    codes = torch.randint(8, (1, 80), generator=torch.Generator().manual_seed(0))
    whole = codec.decode(codes)[0]
    other = codes.clone()
    other[:, 30 + codec.reach :] = 3
    other[:, : 30 - codec.reach] = 5
    error = (codec.decode(other)[0] - whole).square().view(-1, HOP).mean(1)
    power = whole.square().mean()
    assert error[30] < 1e-3 * power and error[30 + codec.reach + 1] > 0.1 * power
    assert codec.reach == REACH and codec.reach % 2 == 0


class Snac:
    """Orpheus' tiny codec without its noise, behind the interface of a speech model."""

    def __init__(self) -> None:
        self.speech = media_pipe("orpheus").speech
        self.context = self.speech.sound_context

    def render(self, frames: Tensor) -> Tensor:
        """Sound `[F, samples]` of codes `[F, 7]`."""
        first = torch.tensor([low for low, _ in self.speech.layout.ranges])
        sound: Tensor = self.speech.render((frames + first).flatten(), 0)
        return sound.view(len(frames), -1)


def test_snac_reads_no_more_than_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    snac = Snac()
    monkeypatch.setattr(torch, "randn", lambda size, generator, **given: torch.zeros(size, **given))
    reach = snac.context.reach
    assert reach == 5 and snac.context.step == 1
    frames = torch.randint(4, (24, 7), generator=torch.Generator().manual_seed(0))
    whole = snac.render(frames)
    window = snac.render(frames[10 - reach : 12 + reach])[reach : reach + 2]
    assert torch.allclose(window, whole[10:12], atol=1e-6)
    narrow = snac.render(frames[10 - 2 : 12 + 2])[2:4]
    assert not torch.allclose(narrow, whole[10:12], atol=1e-6)


@pytest.mark.slow
def test_families_of_the_hub() -> None:
    """Llasa's codec attends to all frames: one chunk, the whole's sound. Orpheus' has noise."""
    options: dict[str, Any] = dict(seed=5, temperature=0.9, chunk_seconds=0.002)
    llasa, orpheus = (media_pipe(family) for family in ("llasa", "orpheus"))
    whole = llasa("blue cat", seed=5, temperature=0.9, max_seconds=0.05)[0]
    made, chunks = stream(llasa, "blue cat", **options, max_seconds=0.05)
    assert len(chunks) == 1 and torch.equal(chunks[0].waveform, whole.waveform)
    assert torch.equal(made.utterance.tokens, whole.tokens)
    whole = orpheus("the grass", seed=5, temperature=0.9, max_seconds=0.02)[0]
    made, chunks = stream(orpheus, "the grass", **options, max_seconds=0.02)
    assert len(chunks) > 1 and torch.equal(made.utterance.tokens, whole.tokens)
    assert_follow(chunks, whole, frames=None)
    again, _ = stream(orpheus, "the grass", **options, max_seconds=0.02, policy=Autoregressive())
    assert torch.equal(made.utterance.waveform, again.utterance.waveform)


def test_a_codecs_noise_and_the_listeners_draws_do_not_meet() -> None:
    """The one who listens draws in a thread of its own while the codec decodes, here within it."""
    orpheus = media_pipe("orpheus")
    tokens = orpheus("the grass", seed=5, temperature=0.9, max_seconds=0.02)[0].tokens
    alone = orpheus.speech.render(tokens, 3)
    torch.manual_seed(1)
    wanted = torch.rand(2)
    drawn: list[Tensor] = []
    hook = orpheus.speech.codec.decoder.register_forward_pre_hook(
        lambda *_: drawn.append(torch.rand(1))
    )
    torch.manual_seed(1)
    sounds = [orpheus.speech.render(tokens, 3) for _ in "ab"]
    hook.remove()
    assert all(torch.equal(sound, alone) for sound in sounds)
    assert torch.equal(torch.cat(drawn), wanted)


def test_parts_of_a_long_text_follow_each_other(voices: TextToSpeech) -> None:
    text = PARTS
    whole = voices(text, seed=[3], max_seconds=0.3)[0]
    made, chunks = stream(voices, text, seed=3, max_seconds=0.3)
    assert len(voices.speech.split(text)) == 4 <= len(chunks)
    assert torch.equal(made.utterance.tokens, whole.tokens)
    assert_follow(chunks, whole, frames=None)
    passes = [chunk.passes for chunk in chunks]
    assert passes == sorted(passes) and passes[-1] <= made.stats.passes == whole.passes


def test_one_seed_one_sound_and_stats(endless: TextToSpeech) -> None:
    made, chunks = stream(endless, seed=None, **LONG)
    seed = made.stats.seed
    assert torch.equal(
        stream(endless, seed=seed, **LONG)[0].utterance.waveform, made.utterance.waveform
    )
    stats = made.stats
    assert stats.sound_seconds == made.utterance.seconds == pytest.approx(1.2)
    assert stats.passes == made.utterance.passes >= chunks[-1].passes
    assert 0 < stats.first_audio_seconds and stats.pixel_seconds > 0
    assert stats.to_dict()["real_time_factor"] == stats.real_time_factor > 0
    assert "first sound after" in stats.summary
    whole = endless("a red fox", seed=seed, **LONG)
    assert whole.real_time_factor > 0


def test_a_tail_that_is_not_sent_is_found(
    voices: TextToSpeech, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an utterance that the model ends."""
    whole = voices("a red fox", seed=4, **LONG)[0]
    assert whole.is_finished and len(whole.tokens) > CHUNK
    take = RowSound.take

    def forget(self: RowSound, tokens: Tensor, passes: int, *, is_whole: bool = False) -> None:
        take(self, tokens, passes)

    def cut(self: RowSound, tokens: Tensor, passes: int, *, is_whole: bool = False) -> None:
        take(self, tokens[:-2] if is_whole else tokens, passes, is_whole=is_whole)

    for planted in (forget, cut):
        monkeypatch.setattr(RowSound, "take", planted)
        chunks = stream(voices, seed=4, **LONG)[1]
        with pytest.raises(AssertionError):
            assert_follow(chunks, whole)


@pytest.mark.parametrize("context", [SoundContext(2, 2), SoundContext(15, 1)], ids=["near", "odd"])
def test_too_little_context_is_heard(
    endless: TextToSpeech, context: SoundContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = endless("a red fox", seed=5, **LONG)[0]
    monkeypatch.setattr(endless.speech, "sound_context", context)
    chunks = stream(endless, seed=5, **LONG)[1]
    assert_follow(chunks, whole)
    with pytest.raises(AssertionError):
        assert_like(chunks, whole, -30)


SLOW = LONG | {"seed": 5, "policy": Autoregressive()}


def is_free(pipe: TextToSpeech) -> bool:
    """Whether it takes another call."""
    return len(pipe("a red fox", seed=5, max_seconds=0.1)) == 1


def test_leaving_the_loop_ends_decoding(endless: TextToSpeech) -> None:
    passes: list[int] = []
    options = SLOW | {"chunk_seconds": 0.04}
    options["on_step"] = lambda progress: passes.append(progress.passes)
    with endless.stream("a red fox", **options) as made:
        for _ in made:
            break
    n = passes[-1]
    assert n < 60 and list(made) == [] and made.stats is None and made.utterance is None
    assert is_free(endless)  # the model is free
    assert passes[-1] == n
    held = endless.stream("a red fox", **options)
    for _ in held:
        break
    assert held.stats is None
    assert is_free(endless)
    with endless.stream("a red fox", **options) as made:
        next(made)
        with pytest.raises(BusyError):
            endless("a red fox", max_seconds=0.1, on_step=lambda _: endless("a"))
    unread = endless.stream("a red fox", **options)
    n = len(passes)
    unread.close()
    assert list(unread) == [] and len(passes) == n


def test_on_step_may_close_its_stream(endless: TextToSpeech) -> None:
    passes: list[int] = []

    def leave(progress: Any) -> None:
        passes.append(progress.passes)
        if progress.passes == 5:
            made.close()

    made = endless.stream("a red fox", **SLOW, on_step=leave)
    assert list(made) == [] and passes == [1, 2, 3, 4, 5] and made.stats is None
    assert is_free(endless)


@pytest.mark.parametrize(("last", "n_frames"), [(33, 33), (4, 10)])
def test_on_step_ends_the_sound_too(endless: TextToSpeech, last: int, n_frames: int) -> None:
    """At 38 tokens the second chunk was due. The first one, of 10 frames, was sent before."""

    def cut(progress: Any) -> Tensor | None:
        return torch.full_like(progress.lengths, last) if progress.lengths[0] == 38 else None

    made, chunks = stream(endless, **SLOW, on_step=cut)
    assert len(made.utterance.tokens) == last
    assert len(join(chunks)) == len(made.utterance.waveform) == n_frames * HOP


def test_ctrl_c_ends_decoding(endless: TextToSpeech) -> None:
    passes: list[int] = []

    def interrupt(progress: Any) -> None:
        passes.append(progress.passes)
        if progress.passes == 3:
            _thread.interrupt_main()

    made = endless.stream("a red fox", **SLOW, on_step=interrupt)
    with pytest.raises(KeyboardInterrupt):
        for _ in made:
            pass
    assert passes[-1] < 60 and is_free(endless)


def spoil_sound(pipe: TextToSpeech, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The codec's call of this number returns NaN."""
    render, calls = pipe.speech.render, itertools.count(1)

    def spoil(tokens: Tensor, seed: int) -> Tensor:
        return render(tokens, seed) * (float("nan") if next(calls) == number else 1)

    monkeypatch.setattr(pipe.speech, "render", spoil)


def test_errors_of_the_run_reach_the_loop(
    endless: TextToSpeech, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_sound(endless, 2, monkeypatch)
    made = endless.stream("a red fox", seed=5, chunk_seconds=0.2, **LONG)
    assert len(next(made).waveform) == CHUNK * HOP
    with pytest.raises(NumericsError, match="waveform"):
        next(made)
    assert list(made) == [] and made.stats is None


def test_the_text_of_bad_sound_is_named_not_its_part(
    endless: TextToSpeech, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_sound(endless, 3, monkeypatch)
    with pytest.raises(NumericsError) as caught:
        list(endless.stream(PARTS, seed=5, max_seconds=0.1))
    assert caught.value.rows == (0,)


def test_serving_counts_the_time_of_chunks_as_sound(
    endless: TextToSpeech, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that the codec alone advances."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    render = endless.speech.render

    def wait(tokens: Tensor, seed: int) -> Tensor:
        now[0] += 1.0
        return render(tokens, seed)

    monkeypatch.setattr(endless.speech, "render", wait)
    stats = endless.serve(
        [SpeechRequest("a red fox", 5, in_chunks=True)],
        max_seconds=1.2,
        rows=1,
        chunk_seconds=0.2,
        deliver=lambda *_: None,
        deliver_chunk=lambda *_: None,
    )
    assert (stats.seconds, stats.pixel_seconds) == (0.0, 6.0)


@pytest.mark.slow
def test_requests_in_chunks_among_others(endless: TextToSpeech) -> None:
    """Chunks of a request are those of a stream, whatever is decoded beside it."""
    chunks: dict[int, list[SpeechChunk]] = {}
    made: dict[int, Utterance] = {}
    requests = [SpeechRequest("a red fox", 5 + k, tag=k, in_chunks=k != 1) for k in range(3)]
    endless.serve(
        requests,
        max_seconds=1.2,
        rows=2,
        chunk_seconds=0.2,
        deliver=lambda request, each: made.update({request.tag: each}),
        deliver_chunk=lambda request, each: chunks.setdefault(request.tag, []).append(each),
    )
    assert set(chunks) == {0, 2} and set(made) == {0, 1, 2}
    for k, said in made.items():
        if k == 1:
            whole = endless("a red fox", seed=[6], **LONG)[0]
            assert torch.equal(said.waveform, whole.waveform)
            continue
        alone, _ = stream(endless, seed=5 + k, **LONG)
        assert torch.equal(said.tokens, alone.utterance.tokens)
        assert_follow(chunks[k], said)
        assert torch.equal(join(chunks[k]), said.waveform)
        assert torch.equal(said.waveform, alone.utterance.waveform)
