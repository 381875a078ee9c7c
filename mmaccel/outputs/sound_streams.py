"""Sound that goes to standard output while it is made, as WAV."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

from torch import Tensor

from mmaccel.errors import MMAccelError, OptionError
from mmaccel.outputs.sound_files import to_pcm, wav_head

Write = Callable[[Tensor], bool]
"""Takes the next samples `[samples]` float in -1..1; returns whether anybody listens."""


class SoundLost(MMAccelError):
    """Standard output did not take sound."""


def check_standard_output() -> None:
    """Refuse a terminal."""
    if sys.stdout.isatty():
        raise OptionError(
            "--stdout: expected a pipe or a file, received a terminal; add | aplay, or > speech.wav"
        )


@contextmanager
def open_standard_output(sample_rate: int) -> Iterator[Write]:
    """Write a WAV of unknown length to standard output, and meanwhile all messages to standard
    error. A reader that has gone had what it wanted.
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
