"""Opens an image model from the values of command-line options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmaccel.checks import show
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_SIDE
from mmaccel.results import EXACT_DTYPE

if TYPE_CHECKING:
    from mmaccel.pipelines.text_to_image.pipeline import TextToImage

AUTO = "auto"
DTYPES = (EXACT_DTYPE, "bfloat16", "float16")
CUDA_GRAPHS = ("auto", "on", "off")

_SIZE = re.compile(r"\s*(\d{1,9})\s*(?:[xX]\s*(\d{1,9})\s*)?")


def pick_name(policy: str | None, options: dict[str, Any], kind: str) -> tuple[str, dict[str, Any]]:
    """The short name of a policy and its options; by default an exact policy.

    Args:
        policy: short name; None takes the default.
        options: fields of the policy.
        kind: "window" or "canvas", of the model.

    Raises:
        OptionError: a policy of another kind.
    """
    from mmaccel.catalog import find_policy

    if policy is not None:
        find_policy(policy, kind)
        return policy, options
    if kind == "window":
        return "jacobi", options
    return "lossless-unmask", options


def parse_size(text: str | None) -> tuple[int, int] | None:
    """The value of `--size`: `768` or `1024x768`, width first.

    Raises:
        OptionError: anything else.
    """
    if text is None:
        return None
    found = _SIZE.fullmatch(text)
    width, height = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise OptionError(
            f"--size: expected pixels such as 768 or 1024x768, up to {MAX_SIDE}, received "
            f"{show(text)}; width comes first"
        )
    return width, height


def choose_names(device: str, dtype: str) -> tuple[str, str]:
    """The values of `--device` and `--dtype` with "auto" replaced by what it means here.

    Raises:
        OptionError: no such device on this machine, or no such dtype.
    """
    from mmaccel.pipelines.loading.placement import choose_placement, name_dtype

    found, kind = choose_placement(device, dtype)
    return str(found), name_dtype(kind)


def parse_cuda_graphs(text: str) -> Literal["auto"] | bool:
    """The value of `--cuda-graphs` as `mmaccel.attach` takes it.

    Raises:
        OptionError: none of `CUDA_GRAPHS`.
    """
    if text not in CUDA_GRAPHS:
        raise OptionError(
            f"--cuda-graphs: expected one of {', '.join(CUDA_GRAPHS)}, received {show(text)}; auto "
            "uses them where they work"
        )
    return "auto" if text == "auto" else text == "on"


def open_pipeline(
    model: str,
    device: str = AUTO,
    dtype: str = AUTO,
    *,
    size: str | None = None,
    decoder: Path | None = None,
    family: str | None = None,
    cuda_graphs: str = "auto",
    fused: Literal["auto"] | bool = "auto",
    compile: Literal["auto"] | bool = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> TextToImage:
    """Load a text-to-image model on a device.

    Args:
        model: name, folder, file or hub id.
        device, dtype: as `TextToImage.from_pretrained` takes them.
        size, decoder, family, cuda_graphs, trust_remote_code, revision: as on the command line.
        fused, compile: as `TextToImage.from_pretrained` takes it.

    Raises:
        OptionError: no such model, device, dtype, size, family or `--cuda-graphs`.
        UnsupportedModelError: see `TextToImage.from_pretrained`.
        MissingBackendError: `--cuda-graphs on` for another device than CUDA.
    """
    pixels = parse_size(size)
    use_graphs = parse_cuda_graphs(cuda_graphs)
    from transformers.utils import logging

    from mmaccel.pipelines.text_to_image.pipeline import TextToImage

    logging.disable_progress_bar()
    return TextToImage.from_pretrained(
        model,
        device=device,
        dtype=dtype,
        size=pixels,
        decoder=decoder,
        family=family,
        cuda_graphs=use_graphs,
        fused=fused,
        compile=compile,
        trust_remote_code=trust_remote_code,
        revision=revision,
    )
