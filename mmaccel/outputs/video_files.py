"""Clip files: MP4 (H.264, by PyAV) or lossless WebP, and next to each a JSON file."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from struct import error as struct_error
from typing import TYPE_CHECKING, Any
from zlib import error as zlib_error

from torch import Tensor

from mmaccel.errors import MissingBackendError, MMAccelError, OptionError
from mmaccel.outputs.whole_files import write_with_facts
from mmaccel.pipelines.image_to_video.preprocessing import upright_rgb
from mmaccel.pipelines.loading.checkpoint import unreadable

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("mp4", "webp")
_MOVING = ("GIF", "PNG", "WEBP", "AVIF", "FLI")  # formats whose pages are frames in time
_ENCODER, _QUALITY = "libx264", "18"  # constant rate factor without visible loss


def pick_format(wanted: str | None) -> str:
    """The format of `--format`; by default mp4 if PyAV can write it, else webp.

    Raises:
        OptionError: none of `FORMATS`.
        MissingBackendError: mp4 without PyAV, or without its encoder.
    """
    if wanted is not None and wanted not in FORMATS:
        raise OptionError(
            f"--format: expected one of {', '.join(FORMATS)}, received {wanted!r}; leave it out"
        )
    try:
        import av
    except ImportError as error:
        if wanted == "mp4":
            raise MissingBackendError(
                "--format: expected the package av for mp4, received none; "
                "pip install 'mmaccel[video]', or choose --format webp"
            ) from error
        return "webp"
    if _ENCODER in av.codecs_available:
        return wanted or "mp4"
    if wanted == "mp4":
        raise MissingBackendError(
            f"--format: expected an av with {_ENCODER} for mp4, received one without; "
            "pip install --force-reinstall av, or choose --format webp"
        )
    return "webp"


def write_video(file: Path, frames: Tensor, fps: float, facts: Mapping[str, Any]) -> None:
    """Write a clip, and `facts` under the same name with `.json`.

    Args:
        file: the final name, with a suffix of `FORMATS`; see `write_with_facts`.
        frames: `[F, height, width, 3]` uint8; for mp4 the sides are even.
        fps: frames a second.
        facts: ready for JSON.

    Raises:
        OSError: no space left, or another error of the encoder.
    """
    write = _write_mp4 if file.suffix == ".mp4" else _write_webp
    write_with_facts(file, facts, lambda path: write(path, frames, fps))


def _write_mp4(path: Path, frames: Tensor, fps: float) -> None:
    import av

    try:
        _encode(path, frames, fps)
    except av.FFmpegError as error:
        if isinstance(error, OSError):
            raise
        raise OSError(error.errno, error.strerror) from error


def _encode(path: Path, frames: Tensor, fps: float) -> None:
    import av

    with av.open(_plain_file(path), "w", format="mp4") as container:
        stream: Any = container.add_stream(_ENCODER, Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.options = "yuv420p", {"crf": _QUALITY}
        for frame in frames.numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def _plain_file(path: Path) -> str:
    """The name of a file for FFmpeg, which reads the part before a colon as a protocol."""
    return f"file:{path}"


def _write_webp(path: Path, frames: Tensor, fps: float) -> None:
    from PIL import Image

    first, *others = [Image.fromarray(frame) for frame in frames.numpy()]
    first.save(
        path, format="WEBP", save_all=True, append_images=others, duration=round(1000 / fps),
        lossless=True, quality=0,
    )  # fmt: skip


def read_frames(file: Path, most: int) -> list[Image]:
    """The last frames of an image, an animated image or a video, rotated as the file says.

    Args:
        file: a file that Pillow or PyAV reads. Of pages that are not frames in time (the preview of
            a camera, layers, scans) the first is read.
        most: largest number of frames.

    Raises:
        OptionError: no such file, or one that neither reads.
    """
    from PIL import Image, UnidentifiedImageError

    broken: tuple[type[Exception], ...] = (SyntaxError, zlib_error, struct_error, *unreadable())
    broken += (Image.DecompressionBombError,)
    if not os.path.isfile(file):
        raise OptionError(f"start: expected a file, received {str(file)!r}; check the path")
    try:
        with Image.open(file) as opened:
            count = getattr(opened, "n_frames", 1) if opened.format in _MOVING else 1
            frames = []
            for page in range(max(0, count - most), count):
                opened.seek(page)
                frames.append(upright_rgb(opened))
            return frames
    except UnidentifiedImageError:
        return _video_frames(file, most)
    except MMAccelError:
        raise
    except broken as error:
        raise OptionError(
            f"start: expected an image or a video, received {str(file)!r}, which Pillow does not "
            f"read ({' '.join(str(error).split())[:120]}); save it again"
        ) from error


def _video_frames(file: Path, most: int) -> list[Image]:
    try:
        import av
    except ImportError as error:
        raise OptionError(
            f"start: expected an image, received {str(file)!r}, which Pillow does not read; "
            "for videos pip install 'mmaccel[video]'"
        ) from error
    try:
        with av.open(_plain_file(file)) as container:
            last = deque(container.decode(video=0), maxlen=most)
            frames = [_rotate(frame) for frame in last]
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise OptionError(
            f"start: expected an image or a video, received {str(file)!r}, which PyAV does not "
            f"read ({' '.join(str(error).split())[:120]}); save it again"
        ) from error
    if not frames:
        raise OptionError(f"start: expected frames in {str(file)!r}, received none; save it again")
    return frames


def _rotate(frame: Any) -> Image:
    """A frame of PyAV as an image, rotated as the file says: telephones film sideways."""
    image: Image = frame.to_image()
    degrees = getattr(frame, "rotation", 0)  # counter-clockwise; older PyAV does not have it
    return image.rotate(degrees, expand=True) if degrees else image
