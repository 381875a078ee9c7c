"""Downloads from the Hugging Face hub: only files that are read, and errors that say what helps.

`huggingface_hub` downloads, shows progress and keeps the cache. This module chooses the files and
says in five different messages that a repository is not there, is gated, cannot be reached, has no
such revision, or does not fit on the disk.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mmaccel.checks import show
from mmaccel.config_files import read_json
from mmaccel.errors import MMAccelError, OptionError
from mmaccel.pipelines.loading.lookalikes import CONFIGS, refuse_lookalike

_HUB = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_SITE = "https://huggingface.co"
_TENSORS = (".bin", ".pt", ".pth", ".ckpt", ".safetensors")
_UNREAD = tuple(  # other frameworks' weights, and what is there for people
    (
        ".h5 .msgpack .onnx .onnx_data .ot .tflite .mlmodel .gguf .npz"
        " .md .png .jpg .jpeg .webp .gif .pdf .mp4 .wav .gitattributes"
    ).split()
)
_VARIANT = re.compile(r"(?<=.)\.(fp16|bf16|fp32|fp8|ema|non_ema)(?=[.-])")


@dataclass(frozen=True)
class HubOptions:
    """What a download from the hub is told, in the words of `huggingface_hub`.

    Attributes:
        revision: branch, tag or commit; None is the main branch.
        token: for private and gated repositories; None takes the one of `hf auth login`.
        variant: of the weights, such as "fp16"; None takes those without one.
        local_files_only: use the cache alone.
        cache_dir: folder of the cache; None is `huggingface_hub`'s own.
    """

    revision: str | None = None
    token: str | None = None
    variant: str | None = None
    local_files_only: bool = False
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("revision", "token", "variant"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value.strip()):
                shown = "another value" if name == "token" else show(value)
                raise OptionError(
                    f"{name}: expected a text or None, received {shown}; leave it out"
                )


USUAL = HubOptions()


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id."""
    return _HUB.fullmatch(name) is not None


def download(name: str, options: HubOptions = USUAL, option: str = "model") -> Path:
    """Download a repository to the hub's cache; the cached copy where the hub cannot be reached.

    Configurations come first: a repository that looks like a model but is none that can run here is
    refused before its weights are downloaded.

    Args:
        name: an id of the hub.
        options: see `HubOptions`.
        option: name of the option in messages.

    Returns:
        The folder of the files in the cache.

    Raises:
        OptionError: not there, gated, no such revision, not reachable, or no room for it.
        UnsupportedModelError: a look-alike; see `refuse_lookalike`.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import errors as hub
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE if options.cache_dir is None else options.cache_dir)

    def fetch(**more: Any) -> Path:
        more |= {"revision": options.revision, "token": options.token, "cache_dir": cache}
        return Path(snapshot_download(name, **more))

    begin = f"{option}: expected"
    if options.local_files_only:
        copy = find_cached(name, options.revision, cache)
        if copy is not None:
            return copy
        raise OptionError(
            f"{begin} {name} in the cache {cache}, received local_files_only=True and no "
            "copy there; download it once without"
        )
    try:
        info = HfApi(token=options.token).model_info(
            name, revision=options.revision, files_metadata=True
        )
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        files = choose_files(sizes, options.variant)
        configs = [file for file in files if PurePosixPath(file).name in CONFIGS]
        folder = fetch(allow_patterns=configs) if configs else None
        if folder is not None:
            read = [folder / file for file in configs if "/" not in file]
            refuse_lookalike(name, {file.name: read_json(file) for file in read}, option)
        check_room(name, sum(sizes[file] for file in files), cache, option)
        return fetch(allow_patterns=files)
    except hub.GatedRepoError as error:
        raise OptionError(
            f"{begin} a repository that this machine may read, received {name!r}, which is gated; "
            f"accept its licence at {_SITE}/{name}, then run hf auth login or pass token="
        ) from error
    except hub.RevisionNotFoundError as error:
        raise OptionError(
            f"revision: expected a branch, tag or commit of {name}, received "
            f"{options.revision!r}; leave it out for the main branch, or see "
            f"{_SITE}/{name}/commits"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise OptionError(
            f"{begin} a repository of the Hugging Face hub, received {name!r}, which is not there "
            f"or private; check the spelling at {_SITE}/models?search={name.split('/')[1]}; if it "
            "is private, run hf auth login or pass token="
        ) from error
    except MMAccelError:
        raise
    except Exception as error:  # of whatever library carries the request
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(name, None, cache, option) from error
        copy = find_cached(name, options.revision, cache)
        if copy is not None:
            return copy
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise OptionError(
            f"{begin} a folder, a copy in the cache or the Hugging Face hub, received {name!r}, "
            f"which is in no cache while the hub cannot be reached ({said}); connect to the "
            "network, or copy the folder here and give its path"
        ) from error


def find_cached(name: str, revision: str | None, cache: Path) -> Path | None:
    """The folder of a repository in the hub's cache, or None; a download may have been cut short.

    Args:
        name: an id of the hub.
        revision: branch, tag or commit; None is the main branch.
        cache: folder of the cache.
    """
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    for file in ("config.json", "model_index.json"):
        found = try_to_load_from_cache(name, file, cache_dir=cache, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    try:  # a repository without either, such as LlamaGen's
        return Path(
            snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (OSError, ValueError):
        return None


def choose_files(names: Iterable[str], variant: str | None = None) -> list[str]:
    """The files of a repository that are read.

    Left out: weights of other frameworks, pictures and texts for people, pickles beside safetensors
    in the same folder, and other variants of the weights.

    Args:
        names: of all files, with folders.
        variant: such as "fp16".
    """
    wanted = [name for name in names if not name.lower().endswith(_UNREAD)]
    kept = []
    for name in wanted:
        folder = PurePosixPath(name).parent
        file = PurePosixPath(name).name
        if not _is_weight(file):
            kept.append(name)
            continue
        beside = [PurePosixPath(n).name for n in wanted if PurePosixPath(n).parent == folder]
        weights = [other for other in beside if _is_weight(other)]
        ours = [other for other in weights if _variant_of(other) == variant]
        if not ours:
            ours = [other for other in weights if _variant_of(other) is None] or weights
        safe = [other for other in ours if ".safetensors" in other]
        if file in (safe or ours):
            kept.append(name)
    return kept


def _is_weight(file: str) -> bool:
    return file.removesuffix(".index.json").endswith(_TENSORS) or ".safetensors.index." in file


def _variant_of(file: str) -> str | None:
    found = _VARIANT.search(file)
    return found[1] if found else None


def check_room(name: str, n_bytes: int, cache: Path, option: str = "model") -> None:
    """Refuse a download that the disk cannot hold; files that are there already are not counted.

    Raises:
        OptionError: with both numbers.
    """
    place = cache
    while not place.exists():
        place = place.parent
    folder = cache / f"models--{name.replace('/', '--')}" / "blobs"
    there = sum(f.stat().st_size for f in folder.iterdir()) if folder.is_dir() else 0
    if n_bytes - there > shutil.disk_usage(place).free:
        raise _no_room(name, n_bytes - there, cache, option)


def _no_room(name: str, n_bytes: int | None, cache: Path, option: str) -> OptionError:
    place = cache if cache.exists() else cache.parent
    free = shutil.disk_usage(place).free if place.exists() else 0
    wanted = f"{n_bytes / 2**30:.1f} GiB" if n_bytes is not None else "more room"
    return OptionError(
        f"{option}: expected {wanted} on the disk of {cache} for {name}, received "
        f"{free / 2**30:.1f} GiB; free some (hf cache ls, hf cache rm), or set HF_HOME to a folder "
        "on another disk"
    )
