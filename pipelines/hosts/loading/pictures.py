"""Picture files of strangers: the one place of the project that opens them.

Pillow may read the formats that pictures have, and none that it hands to a program (PostScript).
The size in the header is checked before pixels are decoded: 20 KB may ask for gigabytes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import error as struct_error
from typing import Any
from zlib import error as zlib_error

from mmaccel.errors import MMAccelError, OptionError
from mmaccel.limits import MAX_PIXELS, MAX_TOGETHER

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_JPEG = ("JPEG", "MPO")
_EXPECTED = "PNG, JPEG, WebP, GIF, BMP or TIFF"
BROKEN = (  # what Pillow and PyAV raise for broken files
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    zlib_error,
    struct_error,
)


@contextmanager
def open_picture(file: str | Path, option: str = "image") -> Iterator[Any]:
    """Open a regular file as a PIL image; an error of Pillow inside the block is an OptionError."""
    from PIL import Image

    if not os.path.isfile(file):  # False for a name that is too long, unlike Path.is_file
        raise OptionError(f"{option}: expected a file, received {str(file)!r}; check the path")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            opened = Image.open(file, formats=FORMATS)
        with opened:
            check_pixels(opened.size, str(file), option)
            yield opened
    except MMAccelError:
        raise
    except Image.DecompressionBombError as error:
        raise OptionError(
            f"{option}: expected at most {MAX_PIXELS} pixels, received {str(file)!r} with more "
            f"({' '.join(str(error).split())[:120]}); scale it down"
        ) from error
    except BROKEN as error:
        raise OptionError(
            f"{option}: expected an image, received {str(file)!r}, which Pillow does not read as "
            f"{_EXPECTED} ({' '.join(str(error).split())[:120]}); save it again as PNG"
        ) from error


def choose_scale(files: Iterable[str | Path], option: str = "image") -> int:
    """How many times smaller JPEGs are decoded (`PIL.Image.Image.draft`): 1, 2, 4 or 8, so that all
    pictures of a call fit into memory.
    """
    counts = {True: 0, False: 0}  # pixels, by whether they are of JPEGs
    for file in files:
        with open_picture(file, option) as opened:
            counts[opened.format in _JPEG] += opened.width * opened.height
    for scale in (1, 2, 4, 8):
        if counts[False] + counts[True] // scale**2 <= MAX_TOGETHER:
            return scale
    raise OptionError(
        f"{option}: expected at most {MAX_TOGETHER} pixels in all pictures together, received "
        f"{sum(counts.values())}; scale them down, or give fewer"
    )


def check_pixels(size: tuple[int, int], name: str, option: str) -> None:
    """Refuse a picture that takes gigabytes to decode, by the size in its header."""
    width, height = size
    if width * height > MAX_PIXELS:
        raise OptionError(
            f"{option}: expected at most {MAX_PIXELS} pixels, received {name!r} with "
            f"{width}x{height}; scale it down"
        )
