"""The repositories of the hub on localhost that serves the steps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_TINY = """
import sys
from pathlib import Path
from tests.fixtures.checkpoints import build_checkpoint
from tests.fixtures.speech import build_speech
folder = Path(sys.argv[1])
build_checkpoint("janus", folder / "janus")
build_speech("llasa", folder)
"""


def build_repositories(folder: Path, python: Path) -> dict[str, Path]:
    """Write repositories; returns their folders by id.

    Args:
        folder: for them.
        python: of an environment with the library, which writes tiny models of random weights.
    """
    demo = ROOT / "mmaccel" / "demo" / "weights" / "scenes"
    found = {
        "own/scenes": demo,
        "own/gated": demo,
        "own/large": shutil.copytree(demo, folder / "large"),
        "deepseek-ai/Janus-Pro-1B": _write(
            folder / "a", "config.json", model_type="multi_modality"
        ),
        "black-forest-labs/FLUX.1-dev": _write(
            folder / "b", "model_index.json", _class_name="FluxPipeline"
        ),
        "own/lora": _write(folder / "c", "adapter_config.json", peft_type="LORA"),
        "deepseek-community/Janus-Pro-1B": folder / "janus",
        "HKUSTAudio/Llasa-1B": folder / "llasa",
        "HKUSTAudio/xcodec2-hf": folder / "xcodec2",
    }
    (found["own/large"] / "more.safetensors").write_bytes(b"x")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    write = [python, "-c", _TINY, folder]
    subprocess.run(write, check=True, env=environment, capture_output=True)
    return found


def _write(folder: Path, file: str, **content: Any) -> Path:
    folder.mkdir()
    (folder / file).write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    return folder
