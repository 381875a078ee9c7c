"""Clip files: MP4 (H.264, by PyAV), lossless WebP or GIF, and next to each a JSON file."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmaccel.checks import check_choice
from mmaccel.errors import MissingBackendError, OptionError
from mmaccel.limits import MAX_DECODED, MAX_KEPT
from mmaccel.outputs.whole_files import write_with_facts
from mmaccel.pipelines.hosts.loading.pictures import BROKEN, check_pixels, open_picture
from mmaccel.pipelines.image_to_video.preprocessing import upright_rgb

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("mp4", "webp", "gif")
_GIF_UNIT = 10  # milliseconds
_DECODER = 3  # frames that Pillow holds of an animation beside those that are kept
_MOVING = ("GIF", "PNG", "WEBP")  # formats whose pages are frames in time
_ENCODER, _QUALITY = "libx264", "18"  # constant rate factor without visible loss


def pick_format(wanted: str | None) -> str:
    """The format of `--format`; by default mp4 if PyAV can write it, else webp."""
    if wanted is not None:
        check_choice("--format", wanted, FORMATS)
    if wanted in ("gif", "webp"):
        return wanted
    try:
        import av

        if _ENCODER in av.codecs_available:
            return "mp4"
    except ImportError:
        pass
    if wanted == "mp4":
        raise MissingBackendError(
            f"--format: expected the package av with {_ENCODER} for mp4, received none; "
            "pip install --force-reinstall 'mmaccel[video]', or choose --format webp"
        )
    return "webp"


def check_sides(suffix: str, size: tuple[int, int]) -> None:
    """Refuse a clip that a format cannot hold, before it is made: mp4 has colours of half the
    resolution.
    """
    if suffix == ".mp4" and (size[0] % 2 or size[1] % 2):
        raise OptionError(
            f"--format: expected even sides for mp4, received a model of {size[0]}x{size[1]}; "
            "choose --format webp or gif"
        )


def write_video(file: Path, frames: Tensor, fps: float, facts: Mapping[str, Any]) -> None:
    """Write a clip `[F, height, width, 3]` uint8, and `facts` under the same name with `.json`."""
    write = _write_mp4 if file.suffix == ".mp4" else _write_pages
    write_with_facts(file, facts, lambda path: write(path, frames, fps))


def _write_mp4(path: Path, frames: Tensor, fps: float) -> None:
    import av

    try:
        with av.open(_plain_file(path), "w", format="mp4") as container:
            stream: Any = container.add_stream(_ENCODER, Fraction(fps).limit_denominator(1001))
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt, stream.options = "yuv420p", {"crf": _QUALITY}
            for frame in frames.numpy():
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode(None))
    except av.FFmpegError as error:
        raise OSError(error.errno, error.strerror) from error


def _plain_file(path: Path) -> str:
    """The name of a file for FFmpeg, which reads the part before a colon as a protocol."""
    return f"file:{path}"


def _write_pages(path: Path, frames: Tensor, fps: float) -> None:
    """A lossless WebP or a GIF, by what the temporary name has before its end."""
    from PIL import Image

    first, *others = [Image.fromarray(frame) for frame in frames.numpy()]
    is_gif = ".gif." in path.name
    unit = _GIF_UNIT if is_gif else 1
    # milliseconds of each frame in whole units, whose sum is the clip's length
    ends = [unit * round(1000 * k / (fps * unit)) for k in range(len(frames) + 1)]
    options: dict[str, Any] = {"loop": 0} if is_gif else {"lossless": True, "quality": 0}
    first.save(
        path,
        format="GIF" if is_gif else "WEBP",
        save_all=True,
        append_images=others,
        duration=[end - begin for begin, end in pairwise(ends)],
        **options,
    )


def read_frames(file: Path, most: int, option: str = "start", room: int = MAX_KEPT) -> list[Image]:
    """The last frames of an image, an animated image or a video, rotated as the file says, at most
    `most` and `room` pixels.

    Of pages that are not frames in time (the preview of a camera, layers, scans) the first is read.
    A page that stays some times the shortest time is as many frames: encoders join equal ones.
    """
    from PIL import UnidentifiedImageError

    try:
        with open_picture(file, option) as opened:
            return _picture_frames(opened, str(file), most, option, room)
    except OptionError as error:
        if isinstance(error.__cause__, UnidentifiedImageError):
            return _video_frames(file, most, option, room)
        raise


def _picture_frames(opened: Any, name: str, most: int, option: str, room: int) -> list[Image]:
    """The last frames of an open picture; one of a format without time has one."""
    count = getattr(opened, "n_frames", 1) if opened.format in _MOVING else 1
    n_kept = min(most, count)
    n_held = n_kept + _DECODER * (count > 1)
    frames, times, n_decoded = [], [], 0
    for page in range(count):  # one by one: a later frame of a GIF may be larger
        opened.seek(page)
        _check_frame(opened.size, name, n_held, option, room)
        n_pixels = opened.width * opened.height
        n_decoded += n_pixels
        if n_decoded + (count - page - 1) * n_pixels > MAX_DECODED:  # before they are decoded
            raise OptionError(
                f"{option}: expected at most {MAX_DECODED} pixels in all frames together, received "
                f"{name!r} with more in {count} frames; give its last frames alone"
            )
        if page >= count - n_kept:
            frames.append(upright_rgb(opened))
            times.append(opened.info.get("duration"))
    if not all(isinstance(time, int | float) and time > 0 for time in times):
        return frames
    shortest = min(times)
    slack = _GIF_UNIT / 4 if opened.format == "GIF" else 0.25  # times are rounded to a unit
    units = [shortest + k * slack for k in (0, -1, 1, -2, 2, -3, 3)]
    unit = min(units, key=lambda unit: sum(abs(t / unit - round(t / unit)) for t in times))
    repeated: deque[Image] = deque(maxlen=most)
    for frame, time in zip(frames, times, strict=True):
        repeated.extend([frame] * min(most, max(1, round(time / unit))))
    return list(repeated)


def _check_frame(size: tuple[int, int], name: str, n_kept: int, option: str, room: int) -> None:
    """Refuse frames that would fill gigabytes together."""
    check_pixels(size, name, option)
    if size[0] * size[1] * n_kept > room:
        raise OptionError(
            f"{option}: expected at most {room} pixels in the frames that are kept and decoded, "
            f"received {name!r} with {n_kept} of {size[0]}x{size[1]}; scale it down"
        )


def _video_frames(file: Path, most: int, option: str, room: int) -> list[Image]:
    try:
        import av
    except ImportError as error:
        raise OptionError(
            f"{option}: expected an image, received {str(file)!r}, which Pillow does not read; "
            "for videos pip install 'mmaccel[video]'"
        ) from error
    try:
        with av.open(_plain_file(file)) as container:
            last: deque[Any] = deque(maxlen=most)
            for frame in container.decode(video=0):
                _check_frame((frame.width, frame.height), str(file), most, option, room)
                last.append(frame)
            # counter-clockwise, as telephones film sideways; older PyAV does not have it
            turns = [getattr(frame, "rotation", 0) for frame in last]
            frames = [each.to_image().rotate(turn, expand=True) for each, turn in zip(last, turns)]
    except OptionError:
        raise
    except (av.FFmpegError, *BROKEN) as error:
        raise OptionError(
            f"{option}: expected an image or a video, received {str(file)!r}, which PyAV does not "
            f"read ({' '.join(str(error).split())[:120]}); save it again"
        ) from error
    if not frames:
        raise OptionError(
            f"{option}: expected frames in {str(file)!r}, received none; save it again"
        )
    return frames
