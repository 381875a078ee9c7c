"""Clips on disk: MP4 (H.264, through PyAV) or lossless WebP, and beside each a JSON file."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmaccel.errors import MissingBackendError, OptionError
from mmaccel.outputs.picture_files import write_whole

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("mp4", "webp")
_QUALITY = "18"  # H.264's constant rate factor; people see no loss


def pick_format(wanted: str | None) -> str:
    """The format that is wanted; mp4 where none is and PyAV is installed, else webp.

    Raises:
        OptionError: none of `FORMATS`.
        MissingBackendError: mp4 without PyAV.
    """
    if wanted is not None and wanted not in FORMATS:
        raise OptionError(
            f"--format: expected one of {', '.join(FORMATS)}, received {wanted!r}; leave it out"
        )
    try:
        import av  # noqa: F401
    except ImportError as error:
        if wanted == "mp4":
            raise MissingBackendError(
                "--format: expected the package av for mp4, received none; "
                "pip install 'mmaccel[video]', or take --format webp"
            ) from error
        return "webp"
    return wanted or "mp4"


def write_video(file: Path, frames: Tensor, fps: float, facts: Mapping[str, Any]) -> None:
    """Write a clip, and `facts` under the same name with `.json`.

    Args:
        file: the final name, with a suffix of `FORMATS`; either both files are there in the end,
            or the JSON alone.
        frames: `[F, height, width, 3]` uint8; for mp4 the sides are even.
        fps: frames a second.
        facts: ready for JSON.
    """
    text = json.dumps(dict(facts), indent=1) + "\n"
    write_whole(file.with_suffix(".json"), lambda path: path.write_text(text, encoding="utf-8"))
    write = _write_mp4 if file.suffix == ".mp4" else _write_webp
    write_whole(file, lambda path: write(path, frames, fps))


def _write_mp4(path: Path, frames: Tensor, fps: float) -> None:
    import av

    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.options = "yuv420p", {"crf": _QUALITY}
        for frame in frames.numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def _write_webp(path: Path, frames: Tensor, fps: float) -> None:
    from PIL import Image

    first, *others = [Image.fromarray(frame) for frame in frames.numpy()]
    first.save(
        path, format="WEBP", save_all=True, append_images=others, duration=round(1000 / fps),
        lossless=True, quality=0,
    )  # fmt: skip


def read_frames(file: Path, most: int) -> list[Image]:
    """The last frames of a picture, an animated picture or a video.

    Args:
        file: what Pillow reads, or PyAV.
        most: of them.

    Raises:
        OptionError: no such file, or nothing that either reads.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not file.is_file():
        raise OptionError(f"start: expected a file, received {str(file)!r}; check the path")
    try:
        with Image.open(file) as opened:
            pages = range(max(0, getattr(opened, "n_frames", 1) - most), 2**31)
            frames = []
            for page in pages[: min(most, getattr(opened, "n_frames", 1))]:
                opened.seek(page)
                frames.append(ImageOps.exif_transpose(opened.convert("RGB")))
            return frames
    except UnidentifiedImageError:
        return list(deque(_video_frames(file), maxlen=most))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise OptionError(
            f"start: expected a picture or a video, received {str(file)!r}, which Pillow does not "
            f"read ({' '.join(str(error).split())[:120]}); save it again"
        ) from error


def _video_frames(file: Path) -> Iterator[Image]:
    try:
        import av
    except ImportError as error:
        raise OptionError(
            f"start: expected a picture, received {str(file)!r}, which Pillow does not read; "
            "for videos pip install 'mmaccel[video]'"
        ) from error
    n_frames = 0
    try:
        with av.open(str(file)) as container:
            for frame in container.decode(video=0):
                n_frames += 1
                yield frame.to_image()
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise OptionError(
            f"start: expected a picture or a video, received {str(file)!r}, which PyAV does not "
            f"read ({' '.join(str(error).split())[:120]}); save it again"
        ) from error
    if not n_frames:
        raise OptionError(f"start: expected frames in {str(file)!r}, received none; save it again")
