"""Features of images, clips and sound: which extractor, and running it over a folder.

`moving-scenes` and `voices` are small networks that ship, of clips and of speech; distances over
them are called FVD-own and FAD-own here, since no published FVD or FAD compares with them. Of
images, `scenes` is the small network that ships (images of 64x64 captioned scenes alone), and
`inception` is the network of FID as torch-fidelity carries it, for which a file with its weights is
given. `module:function` is the user's own.

The features of `inception` are those of the original (pool3, 2048 wide), the original's way of
resizing to 299x299 included, so that distances are comparable with torch-fidelity's and
pytorch-fid's. torchmetrics resizes with antialiasing by default and gives other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmaccel.checks import show
from mmaccel.errors import MissingBackendError, OptionError, ShapeError
from mmaccel.evaluation.quality.frechet import Array, check_features
from mmaccel.limits import MAX_WIDTH
from mmaccel.own_code import import_named, reason

Extract = Callable[[Tensor], Tensor]
"""Images `[B, 3, H, W]` or clips `[B, F, 3, H, W]`, uint8, to features `[B, D]`."""
Hear = Callable[[Tensor, int], Tensor]
"""One sound `[samples]` float32 in -1..1, and its rate in Hz, to features `[N, D]` of N windows."""


def open_extractor(name: str, weights: Path | None = None) -> Extract:
    """An extractor by name.

    Args:
        name: "scenes", "inception" or "module:function".
        weights: a file; for inception alone.

    Raises:
        OptionError: another name, or weights too many or too few.
        MissingBackendError: inception without torch-fidelity.
    """
    from mmaccel.demo.scenes.features import extract_features

    if (weights is not None) != (name == "inception"):
        wanted = "a file for inception" if weights is None else f"none for {name}"
        raise OptionError(
            f"weights: expected {wanted}, received {None if weights is None else str(weights)!r}; "
            "the weights of FID are weights-inception-2015-12-05-6726825d.pth of torch-fidelity"
        )
    if name == "scenes":
        return extract_features
    if name == "inception":
        assert weights is not None
        return open_inception(weights)
    return load_callable(name, "features", "scenes, inception or module:function")


def open_clip_extractor(name: str) -> Extract:
    """An extractor of clips by name: "moving-scenes" or "module:function".

    Raises:
        OptionError: another name.
    """
    from mmaccel.demo.moving_scenes.features import extract_clip_features

    if name == "moving-scenes":
        return extract_clip_features
    return load_callable(name, "features", "moving-scenes or module:function", "clips")


def open_sound_extractor(name: str) -> Hear:
    """An extractor of sound by name: "voices" or "module:function".

    Raises:
        OptionError: another name.
    """
    if name == "voices":
        return _hear_voices
    return load_callable(name, "features", "voices or module:function", "samples")


def _hear_voices(sound: Tensor, rate: int) -> Tensor:
    """Features of the windows of a sound.

    Raises:
        OptionError: another rate than the network's.
    """
    from mmaccel.demo.voices.features import RATE, extract_speech_features

    if rate != RATE:
        raise OptionError(
            f"features: expected sound of {RATE} Hz for voices, received {rate} Hz; resample it, "
            "or give --features module:function"
        )
    return extract_speech_features(sound)


def load_callable(
    name: str, option: str, wanted: str = "module:function", items: str = "images"
) -> Callable[..., Any]:
    """Import a callable of the user's; see `mmaccel.own_code.import_named`.

    Args:
        name: "module:function".
        option: begins the messages.
        wanted: what is expected, in messages.
        items: what the first argument has, in messages.

    Returns:
        A function that calls it, and raises OptionError where it raises anything.

    Raises:
        OptionError: no such module or name, no callable, or a module that raises when imported.
    """
    found = import_named(name, option, wanted)
    if not callable(found):
        raise OptionError(f"{option}: expected {wanted}, received {show(name)}; name a callable")

    def call(*args: Any) -> Any:
        try:
            return found(*args)
        except (Exception, SystemExit) as error:
            raise OptionError(
                f"{option}: expected {show(name)} to return for {len(args[0])} {items}, received "
                f"{reason(error)}; call it with such {items} to find out why"
            ) from error

    return call


def extract_all(batches: Iterable[Tensor], extract: Extract) -> Array:
    """Features `[N, D]` float64 of all images or clips.

    Args:
        batches: see `Extract`.
        extract: see there.

    Raises:
        ShapeError: what the extractor returns is not `[B, D]`, or D changes.
        NumericsError: features that are not finite.
    """
    parts: list[Array] = []
    for batch in batches:
        with torch.no_grad():
            found = _to_array(extract(batch))
        if found.ndim != 2 or len(found) != len(batch):
            raise ShapeError(
                f"features: expected [{len(batch)}, D] for a batch of {len(batch)}, received "
                f"{list(found.shape)}; return one row for each item"
            )
        parts.append(_check_part(found, parts))
    return np.concatenate(parts)


def extract_sounds(sounds: Iterable[tuple[Tensor, int]], hear: Hear) -> Array:
    """Features `[N, D]` float64 of the windows of all sounds.

    Args:
        sounds: waveforms and their rates.
        hear: see `Hear`.

    Raises:
        ShapeError: what the extractor returns is not `[N, D]`, or D changes.
        NumericsError: features that are not finite.
    """
    parts: list[Array] = []
    for waveform, rate in sounds:
        with torch.no_grad():
            found = _to_array(hear(waveform, rate))
        parts.append(_check_part(found, parts))
    return np.concatenate(parts)


def _check_part(found: Array, before: Sequence[Array]) -> Array:
    """Features of a batch or a sound, `[N, D]`, D as in those before.

    Raises:
        ShapeError, NumericsError: see `extract_all`.
    """
    checked = check_features(found, least=1)
    width = checked.shape[1]
    if width > MAX_WIDTH:
        raise ShapeError(
            f"features: expected a width of at most {MAX_WIDTH}, received {width}, "
            "whose covariance takes its square in memory; pool, or project to fewer"
        )
    if before and width != before[0].shape[1]:
        raise ShapeError(
            f"features: expected a width of {before[0].shape[1]} for every batch, received "
            f"{width}; pool over what depends on the size of an item"
        )
    return checked


def _to_array(made: Any) -> Array:
    """What an extractor returned as float64 on the CPU.

    Raises:
        ShapeError: no tensor, and nothing of which one can be made.
    """
    try:
        given = torch.as_tensor(made).detach().cpu()
        found: Array = np.asarray(given if given.is_complex() else given.double())  # refused later
    except Exception as error:  # of whatever the user's code returned
        raise ShapeError(
            f"features: expected a tensor [B, D], received {type(made).__name__}; return one row "
            "for each item"
        ) from error
    return found


def open_inception(weights: Path) -> Callable[[Tensor], Tensor]:
    """Images `[B, 3, H, W]` uint8 to features `[B, 2048]` float32.

    Args:
        weights: a file of torch-fidelity's, a plain state dict.

    Raises:
        OptionError: no such file, or other tensors in it.
        MissingBackendError: torch-fidelity is not installed.
    """
    if not weights.is_file():
        raise OptionError(f"weights: expected a file, received {str(weights)!r}; check the path")
    network_class = import_inception()
    try:
        torch.load(weights, map_location="cpu", weights_only=True)  # runs no code of the file
        network: Any = network_class("inception-v3-compat", ["2048"], str(weights)).eval()
    except Exception as error:  # of whatever a file holds
        raise OptionError(
            f"weights: expected the state dict of torch-fidelity's Inception, received "
            f"{str(weights)!r} ({reason(error)}); take "
            "weights-inception-2015-12-05-6726825d.pth of its releases"
        ) from error

    def extract(pixels: Tensor) -> Tensor:
        features: Tensor = network(pixels)[0]
        return features

    return extract


def import_inception() -> Any:
    """The class of the network.

    Raises:
        MissingBackendError: torch-fidelity is not installed.
    """
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError as error:
        raise MissingBackendError(
            f"inception: expected torch-fidelity, which cannot be imported ({reason(error)}); pip "
            "install torch-fidelity, or give --features module:function"
        ) from error
    return FeatureExtractorInceptionV3
