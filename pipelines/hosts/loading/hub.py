"""Downloads from the Hugging Face hub: only files that are read, and errors that say what helps."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from mmaccel.errors import MMAccelError, OptionError
from mmaccel.options import LoadOptions
from mmaccel.pipelines.hosts.loading.lookalikes import CONFIGS, refuse_lookalike

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


USUAL = LoadOptions()


def is_hub_id(name: str) -> bool:
    return _HUB.fullmatch(name) is not None


def download(name: str, options: LoadOptions = USUAL, option: str = "model") -> Path:
    """Download a repository to the hub's cache; the cached copy where the hub cannot be reached.

    One that is known not to run here is refused before its weights. Errors name `option`.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub import errors as hub
    from huggingface_hub.constants import HF_HUB_CACHE

    cache = Path(HF_HUB_CACHE if options.cache_dir is None else options.cache_dir)
    if options.local_files_only:
        copy = find_cached(name, options.revision, cache)
        if copy is not None:
            return copy
        raise OptionError(
            f"{option}: expected {name} in the cache {cache}, received local_files_only=True and "
            "no copy there; download it once without"
        )
    where: dict[str, Any] = {
        "revision": options.revision, "token": options.token, "cache_dir": cache
    }  # fmt: skip
    try:
        info = HfApi(token=options.token).model_info(
            name, revision=options.revision, files_metadata=True
        )
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        files = choose_files(sizes, options.variant)
        configs = [file for file in files if PurePosixPath(file).name in CONFIGS]
        if configs:
            folder = snapshot_download(name, allow_patterns=configs, **where)
            refuse_lookalike(name, Path(folder), option)
        there = cache / f"models--{name.replace('/', '--')}" / "blobs"
        n_bytes = sum(sizes[file] for file in files)
        n_bytes -= sum(file.stat().st_size for file in there.glob("*"))
        place = next(folder for folder in (cache, *cache.parents) if folder.exists())
        free = shutil.disk_usage(place).free
        if n_bytes > free:
            raise OptionError(
                f"{option}: expected {n_bytes / 2**30:.1f} GiB on the disk of {cache} for {name}, "
                f"received {free / 2**30:.1f} GiB; free some (hf cache ls, hf cache rm), or set "
                "HF_HOME to a folder on another disk"
            )
        return Path(snapshot_download(name, allow_patterns=files, **where))
    except MMAccelError:
        raise
    except hub.GatedRepoError as error:
        raise OptionError(
            f"{option}: expected a repository that this machine may read, received {name!r}, which "
            f"is gated; accept its licence at {_SITE}/{name}, then run hf auth login or pass token="
        ) from error
    except hub.RevisionNotFoundError as error:
        raise OptionError(
            f"revision: expected a branch, tag or commit of {name}, received {options.revision!r}; "
            f"leave it out for the main branch, or see {_SITE}/{name}/commits"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise OptionError(
            f"{option}: expected a repository of the Hugging Face hub, received {name!r}, which is "
            f"not there or private; check the spelling at {_SITE}/models?search="
            f"{name.split('/')[1]}; if it is private, run hf auth login or pass token="
        ) from error
    except Exception as error:  # of whatever library carries the request
        copy = find_cached(name, options.revision, cache)
        if copy is not None:
            return copy
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        raise OptionError(
            f"{option}: expected a folder, a copy in the cache or the Hugging Face hub, received "
            f"{name!r}, which is in no cache while the hub cannot be reached ({said}); connect to "
            "the network, or copy the folder here and give its path"
        ) from error


def find_cached(name: str, revision: str | None, cache: Path) -> Path | None:
    """The folder of a repository in the hub's cache; a download may have been cut short."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    for file in ("config.json", "model_index.json"):
        file_path = try_to_load_from_cache(name, file, cache_dir=cache, revision=revision)
        if isinstance(file_path, str):
            return Path(file_path).parent
    try:  # a repository without either, such as LlamaGen's
        return Path(
            snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
        )
    except (OSError, ValueError):
        return None


def choose_files(names: Iterable[str], variant: str | None = None) -> list[str]:
    """The files of a repository that are read.

    Left out: weights of other frameworks, pictures, texts for people, pickles beside safetensors of
    the same folder, and other variants (such as "fp16") of the weights.
    """
    read = [name for name in names if not name.lower().endswith(_UNREAD)]
    groups: dict[PurePosixPath, list[str]] = {}
    for name in filter(_is_weight, read):
        groups.setdefault(PurePosixPath(name).parent, []).append(name)
    kept = set()
    for beside in groups.values():
        of_variant = [name for name in beside if _variant_of(name) == variant]
        of_variant = of_variant or [name for name in beside if _variant_of(name) is None] or beside
        kept |= set([name for name in of_variant if ".safetensors" in name] or of_variant)
    return [name for name in read if name in kept or not _is_weight(name)]


def _is_weight(file: str) -> bool:
    return file.removesuffix(".index.json").endswith(_TENSORS) or ".safetensors.index." in file


def _variant_of(file: str) -> str | None:
    match = _VARIANT.search(file)
    return match[1] if match else None
