"""Where sound goes while it is made: the machine's loudspeaker, or a WAV on standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from functools import partial
from typing import Any

from torch import Tensor

from mmaccel.checks import importing
from mmaccel.errors import MissingBackendError, MMAccelError, OptionError
from mmaccel.outputs.sound_files import to_pcm, wav_head

_BLOCK = 0.1  # seconds that are handed to the loudspeaker at a time, between which Ctrl-C acts

Write = Callable[[Tensor], bool]
"""Takes the next samples `[samples]` float in -1..1; returns whether anybody listens."""


class SoundLost(MMAccelError):
    """Standard output did not take sound."""


def find_sink(is_played: bool) -> Callable[[int], AbstractContextManager[Write]]:
    """What opens a place for sound of a sample rate in Hz.

    Args:
        is_played: by the loudspeaker; else it goes to standard output.

    Raises:
        MissingBackendError: the package that plays is not installed, or its library is not.
        OptionError: standard output is a terminal.
    """
    if not is_played:
        if sys.stdout.isatty():
            raise OptionError(
                "--stdout: expected a pipe or a file, received a terminal; add | aplay, or > "
                "speech.wav"
            )
        return _open_standard_output
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
    return partial(_open_loudspeaker, sounddevice)


@contextmanager
def _open_loudspeaker(sounddevice: Any, sample_rate: int) -> Iterator[Write]:
    """Play until all was heard; an exception ends the sound at once.

    Raises:
        MissingBackendError: there is no loudspeaker, it does not play this rate, or it fails.
    """
    failure, block = sounddevice.PortAudioError, 2 * int(_BLOCK * sample_rate)

    def write(waveform: Tensor) -> bool:
        data = to_pcm(waveform)
        for begin in range(0, len(data), block):
            stream.write(data[begin : begin + block])
        return True

    try:
        stream = sounddevice.RawOutputStream(samplerate=sample_rate, channels=1, dtype="int16")
        try:
            stream.start()
            yield write
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


@contextmanager
def _open_standard_output(sample_rate: int) -> Iterator[Write]:
    """Write a WAV of unknown length to standard output, and meanwhile all messages to standard
    error. A reader that has gone had what it wanted.

    Raises:
        SoundLost: it cannot be written.
    """
    stream, head = sys.stdout.buffer, wav_head(sample_rate)

    def send(data: bytes) -> bool:
        nonlocal head
        try:
            stream.write(head + data)
            stream.flush()
        except BrokenPipeError:
            return False
        except OSError as error:
            raise SoundLost(
                f"--stdout: expected space for the sound, received: {error.strerror}; free some "
                "space and run it again"
            ) from error
        head = b""
        return True

    with redirect_stdout(sys.stderr):
        yield lambda waveform: send(to_pcm(waveform))
        send(b"")  # the head, if no sound came
