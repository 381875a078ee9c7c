"""Sound in chunks while its tokens are decoded.

A chunk, a fixed number of frames, is decoded with the frames around it that the codec reads
(`SoundContext`) once they are accepted: a policy changes when it comes, not how it sounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from queue import SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any, Self

import torch
from torch import Tensor

from mmaccel.contracts import FinishedRow
from mmaccel.pipelines.text_to_speech.plan import SpeechPlan, take_codes
from mmaccel.pipelines.text_to_speech.types import SpeechChunk, SpeechModel, Utterance
from mmaccel.results import Progress, Stats
from mmaccel.samplers.checks import check_limit
from mmaccel.tokenizers_vq.decoded import limit


class ChunkSender:
    def __init__(self, sample_rate: int, deliver: Callable[[SpeechChunk], None]) -> None:
        self._sample_rate = sample_rate
        self._deliver = deliver
        self._n_sent = 0  # samples

    def __call__(self, sound: Tensor, passes: int) -> None:
        """Deliver the next piece, `[samples]`, with the passes of the run so far."""
        start = self._n_sent / self._sample_rate
        self._n_sent += len(sound)
        self._deliver(SpeechChunk(sound, self._sample_rate, start, passes))


class RowSound:
    """The sound of one row, in chunks."""

    def __init__(
        self,
        speech: SpeechModel,
        plan: SpeechPlan,
        index: int,  # of the row in the plan
        *,
        number: int,  # of the row in the run
        frames: int,  # of a chunk
        # receives the sound of every chunk, and the passes so far
        send: Callable[[Tensor, int], None],
    ) -> None:
        self.number = number
        self._speech = speech
        self._seed = plan.seeds[index]
        self._n_codes = plan.n_codes
        self._frames = frames
        self._send = send
        self._parts: list[Tensor] = []
        self._done = 0  # frames that were sent

    def take(self, tokens: Tensor, passes: int, *, is_whole: bool = False) -> None:
        """Send the chunks that can be decoded, of all tokens `[n]` of the row so far."""
        codes, _ = take_codes(tokens, self._speech.layout, self._n_codes)
        n_frames = len(codes) // self._speech.layout.frame
        is_whole = is_whole or len(codes) == self._n_codes
        reach = self._speech.sound_context.reach
        while self._done < n_frames:
            end = n_frames if reach is None else self._done + self._frames
            is_ready = reach is not None and end + reach <= n_frames
            if not is_ready and not is_whole:
                return
            sound = self._render(codes, min(end, n_frames))
            self._parts.append(sound)
            self._send(sound, passes)

    def _render(self, codes: Tensor, end: int) -> Tensor:
        """The frames from the last one that was sent up to `end`, amid those around them."""
        columns = self._speech.layout.frame
        context = self._speech.sound_context
        first, last = 0, len(codes) // columns  # frames that are decoded, of which it sends some
        if context.reach is not None:
            first = max(0, self._done - context.reach) // context.step * context.step
            last = min(last, end + context.reach)
        # a codec that draws noise draws other noise in each window
        window = codes[first * columns : last * columns].clone()
        sound = self._speech.render(window, (self._seed + first) % 2**64)
        samples = self._speech.frame_samples
        sound = sound[(self._done - first) * samples : (end - first) * samples]
        self._done = end
        return check_sound(sound, self.number)

    def join(self) -> Tensor:
        """All sound that was sent, `[samples]`."""
        nothing = torch.zeros(0, device="cpu", dtype=torch.float32)
        return torch.cat([nothing, *self._parts])


class RunningSound:
    """The `on_step` of a run some of whose rows are sent in chunks.

    A row that `on_step` ends sends no frames behind its end, except those that were sent before.
    Frames of a canvas are filled in any order, so that its rows are sent when they have ended.
    """

    def __init__(
        self, on_step: Callable[[Any], Tensor | None] | None, *, is_canvas: bool = False
    ) -> None:
        self._on_step, self._is_canvas = on_step, is_canvas
        self._rows: dict[int, RowSound] = {}
        self._passes = 0
        self.seconds = 0.0  # spent in decoding and sending chunks between passes

    def begin(self, sound: RowSound) -> None:
        self._rows[sound.number] = sound

    def __call__(self, progress: Progress) -> Tensor | None:
        limits = None if self._on_step is None else self._on_step(progress)
        self._passes = progress.passes
        if self._is_canvas:
            return limits
        lengths = progress.lengths
        if limits is not None:
            limits = check_limit(limits, lengths)
            lengths = torch.minimum(lengths, limits)
        began = time.perf_counter()
        for batch_slot, number in enumerate(progress.rows):
            sound = self._rows.get(number)
            if sound is not None:
                n = int(lengths[batch_slot])
                sound.take(progress.tokens[batch_slot, :n], progress.passes)
        self.seconds += time.perf_counter() - began
        return limits

    def move_seconds(self, stats: Stats) -> None:
        """Count the time of sound as such, and not as decoding."""
        stats.seconds -= self.seconds
        stats.pixel_seconds += self.seconds

    def end(self, row: FinishedRow) -> Tensor | None:
        """Send what remains of a row; all of its sound, or None where it is not sent in chunks."""
        sound = self._rows.pop(row.row, None)
        if sound is None:
            return None
        sound.take(row.tokens, self._passes, is_whole=True)
        return sound.join()


def check_sound(sound: Tensor, number: int) -> Tensor:
    """The sound of a codec for the row of a number, float32 in -1..1, on the CPU."""
    return limit(sound.float(), -1, "waveform: expected samples", number).cpu()


@dataclass
class StreamStats(Stats):
    """Stats of a stream."""

    first_audio_seconds: float = 0.0  # from the first question for a chunk until it was there
    sound_seconds: float = 0.0  # duration of all chunks

    @property
    def real_time_factor(self) -> float:
        """Seconds of work for a second of sound; 0.0 where there is no sound."""
        seconds = self.seconds + self.pixel_seconds
        return seconds / self.sound_seconds if self.sound_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "real_time_factor": self.real_time_factor}

    @property
    def summary(self) -> str:
        return (
            f"{super().summary}, first sound after {self.first_audio_seconds:.2f} s, "
            f"real-time factor {self.real_time_factor:.2f}"
        )


Decode = Callable[[Callable[[SpeechChunk], None], Callable[[], None]], tuple[Utterance, Stats]]
"""Decodes with a receiver of chunks, and a function to call after every pass."""


class StreamClosed(Exception):
    """Ends the run of a stream that was closed; raised and caught by `_Channel` alone."""


class _Channel:
    """What the thread that decodes and the one that listens share."""

    def __init__(self) -> None:
        self.items: SimpleQueue[SpeechChunk | BaseException | None] = SimpleQueue()
        self.is_closed = Event()
        self.result: tuple[Utterance, Stats] | None = None

    def put(self, chunk: SpeechChunk) -> None:
        self.check()
        self.items.put(chunk)

    def check(self) -> None:
        if self.is_closed.is_set():
            raise StreamClosed

    def run(self, decode: Decode) -> None:
        """Decode in this thread, and report how it ended."""
        end: BaseException | None = None
        try:
            self.result = decode(self.put, self.check)
        except StreamClosed:
            pass
        except BaseException as error:
            end = error
        self.items.put(end)


class SpeechStream:
    """An utterance in chunks, decoded, from the first question for one, in a thread of its own.

    Decoding does not wait for the listener. As a context manager it is closed at the end of the
    block. `utterance`, whose waveform is the chunks, and `stats` are None before the end.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._channel = _Channel()
        self._thread: Thread | None = None
        self._has_ended = False
        self._began = self._first = 0.0
        self.utterance: Utterance | None = None
        self.stats: StreamStats | None = None

    def __iter__(self) -> Iterator[SpeechChunk]:
        """The chunks that remain; leaving the loop over them closes the stream."""
        try:
            while (chunk := next(self, None)) is not None:
                yield chunk
        finally:
            self.close()

    def __next__(self) -> SpeechChunk:
        if self._has_ended:
            raise StopIteration
        try:
            if self._thread is None:
                self._began = time.perf_counter()
                # the thread holds no reference to the stream, so that it ends with the last one
                self._thread = Thread(
                    target=self._channel.run,
                    args=(self._decode,),
                    name="mmaccel-speech",
                    daemon=True,
                )
                self._thread.start()
            item = self._channel.items.get()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if isinstance(item, SpeechChunk):
            self._first = self._first or time.perf_counter()
            return item
        self.close()
        if item is not None:
            raise item
        if self._channel.result is not None:
            self._finish(*self._channel.result)
        raise StopIteration

    def _finish(self, utterance: Utterance, stats: Stats) -> None:
        self.utterance = utterance
        self.stats = StreamStats(
            **{each.name: getattr(stats, each.name) for each in fields(Stats)},
            first_audio_seconds=max(0.0, self._first - self._began),
            sound_seconds=utterance.seconds,
        )

    def close(self) -> None:
        """End decoding after the pass that runs, and wait for it, except in `on_step`."""
        self._has_ended = True
        self._channel.is_closed.set()
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not current_thread():
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
