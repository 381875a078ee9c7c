"""Where sound goes while it is made: the machine's loudspeaker, or a WAV on standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, Protocol

from torch import Tensor

from mmaccel.checks import importing
from mmaccel.errors import MissingBackendError, MMAccelError, OptionError
from mmaccel.outputs.sound_files import to_pcm, wav_head

_BLOCK = 0.1  # seconds that are handed to the loudspeaker at a time, between which Ctrl-C acts


class SoundLost(MMAccelError):
    """Standard output did not take sound."""


class SoundSink(Protocol):
    """Takes sound as it comes."""

    def write(self, waveform: Tensor) -> bool:
        """Take the next samples `[samples]` float in -1..1; returns whether anybody listens."""


class Loudspeaker:
    """The machine's loudspeaker, by the package `sounddevice`.

    Args:
        stream: an open `sounddevice.RawOutputStream`.
        sample_rate: in Hz.
    """

    def __init__(self, stream: Any, sample_rate: int) -> None:
        self._stream = stream
        self._bytes = 2 * int(_BLOCK * sample_rate)

    def write(self, waveform: Tensor) -> bool:
        """Play, as soon as what came before has been played."""
        data = to_pcm(waveform)
        for begin in range(0, len(data), self._bytes):
            self._stream.write(data[begin : begin + self._bytes])
        return True


class StandardOutput:
    """A WAV of unknown length on standard output.

    Args:
        stream: the bytes of standard output.
        sample_rate: in Hz.
    """

    def __init__(self, stream: Any, sample_rate: int) -> None:
        self._stream = stream
        self._head = wav_head(sample_rate)

    def write(self, waveform: Tensor) -> bool:
        """Write what is there; a reader that has gone had what it wanted.

        Raises:
            SoundLost: it cannot be written.
        """
        return self._send(to_pcm(waveform))

    def finish(self) -> None:
        """Write the head, if no sound came."""
        if self._head:
            self._send(b"")

    def _send(self, data: bytes) -> bool:
        try:
            self._stream.write(self._head + data)
            self._stream.flush()
        except BrokenPipeError:
            return False
        except OSError as error:
            raise SoundLost(
                f"--stdout: expected space for the sound, received: {error.strerror}; free some "
                "space and run it again"
            ) from error
        self._head = b""
        return True


def find_loudspeaker() -> Any:
    """The package that plays.

    Raises:
        MissingBackendError: it is not installed, or its library is not.
    """
    missing = (
        "--play: expected the package sounddevice, which plays sound, received none; "
        "pip install mmaccel[play]"
    )
    with importing(missing):
        try:
            import sounddevice
        except OSError as error:
            raise MissingBackendError(
                f"--play: expected PortAudio, which sounddevice plays with, received: {error}; "
                "install it (on Debian libportaudio2), or take --stdout"
            ) from error
    return sounddevice


@contextmanager
def open_loudspeaker(sounddevice: Any, sample_rate: int) -> Iterator[SoundSink]:
    """Play until all was heard; an exception ends the sound at once.

    Raises:
        MissingBackendError: there is no loudspeaker, it does not play this rate, or it fails.
    """
    failure = sounddevice.PortAudioError
    try:
        stream = sounddevice.RawOutputStream(samplerate=sample_rate, channels=1, dtype="int16")
        try:
            stream.start()
            yield Loudspeaker(stream, sample_rate)
            stream.stop()
        except BaseException:
            with suppress(failure):  # of a loudspeaker that has failed
                stream.abort()
            raise
        finally:
            with suppress(failure):
                stream.close()
    except failure as error:
        raise MissingBackendError(
            f"--play: expected a loudspeaker that plays {sample_rate} Hz, received: {error}; "
            "leave it out, or take --stdout"
        ) from error


def check_pipe() -> None:
    """Refuse to write sound to a terminal.

    Raises:
        OptionError: standard output is one.
    """
    if sys.stdout.isatty():
        raise OptionError(
            "--stdout: expected a pipe or a file, received a terminal; add | aplay, or > speech.wav"
        )


@contextmanager
def open_standard_output(sample_rate: int) -> Iterator[SoundSink]:
    """Write sound to standard output, and meanwhile all messages to standard error.

    Raises:
        OptionError: standard output takes text alone.
    """
    try:
        stream = sys.stdout.buffer
    except AttributeError as error:
        raise OptionError(
            "--stdout: expected a standard output that takes bytes, received one of text alone; "
            "write a file with --out"
        ) from error
    with redirect_stdout(sys.stderr):
        output = StandardOutput(stream, sample_rate)
        yield output
        output.finish()
