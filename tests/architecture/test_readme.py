"""The README and guides: their Python runs."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmaccel
from benchmarks.report import read_reports
from tests.architecture.source import ROOT
from tests.architecture.test_examples import save_language_model
from tests.delay.models import make_musicgen
from tests.depth.models import make_csm
from tests.fixtures.denoiser_targets import TARGETS
from tests.fixtures.llada2 import build_pipe
from tests.fixtures.shared import reading_folders
from tests.fixtures.speech import build_speech
from tests.fixtures.tiny_lms import EOS, VOCAB, build_lm
from tests.fixtures.tiny_model import N_CODES, build_tiny, build_tiny_clips
from tests.fixtures.tiny_vlms import build_vlm, draw_prompts, encodes_first
from tests.fixtures.tiny_vqa import save_vqa
from tests.fixtures.video import build_video

_MADE: dict[str, Callable[[], Any]] = {  # values that need no folder
    "inputs": lambda: {"input_ids": torch.tensor([[N_CODES, N_CODES + 3, N_CODES + 1]])},
    "denoiser": TARGETS["masked-lm"],
    "vlm": lambda: build_vlm("llava"),
    "image_inputs": lambda: draw_prompts("llava", build_vlm("llava")),
    "llada2": lambda: build_pipe("blocks"),
    "image": lambda: Image.new("RGB", (48, 32), "orange"),
    "csm": lambda: make_csm().model,
    "csm_inputs": lambda: {"input_ids": torch.tensor([[5, 7, 3]]), "max_new_tokens": 3},
    "speech_lm": lambda: build_lm("qwen2"),
    "speech_inputs": lambda: {"input_ids": torch.tensor([[4, 5, 6]])},
    "code_ids": lambda: (8, VOCAB),
    "end_id": lambda: EOS,
    "reading_model": lambda: reading_folders()[0],
    "t5": lambda: reading_folders()[2],
    "musicgen": make_musicgen,
    "musicgen_inputs": lambda: {"input_ids": torch.tensor([[5, 7, 3]])},
}


def provide(name: str, folder: Path) -> Any:
    """A value that a Python block names in its first line, `# requires: NAME, …`."""
    from transformers import AutoModelForCausalLM

    if name in _MADE:
        return _MADE[name]()
    if name in ("video_model", "video_codec"):
        return build_video(folder)[name == "video_codec"]
    if name == "text_video_model":
        return build_tiny_clips(folder)
    if name == "vqa_model":
        return save_vqa(folder)
    if name in ("speech_model", "codec"):
        return build_speech("llasa", folder)[name == "codec"]
    assert name == "model", f"# requires: expected a name of this function, received {name!r}"
    folder.mkdir()
    return AutoModelForCausalLM.from_pretrained(build_tiny(folder, max_position_embeddings=128))


HUB = {"HuggingFaceTB/SmolLM2-135M-Instruct": save_language_model}  # and a tiny model of its class


GUIDES = (
    "coming-from", "extending", "speech", "video", "answer", "visual-tokens",
)  # fmt: skip


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{guide}.md" for guide in GUIDES)])
def test_python_blocks_run_in_order(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", content, re.DOTALL | re.MULTILINE)
    assert blocks
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look for it there
    names = vars(module)
    for number, block in enumerate(blocks, 1):
        required = re.match(r"# requires: (.*)\n", block)
        if required and re.search("vlm|vqa", required[1]) and not encodes_first():
            names["mmaccel"] = mmaccel  # visual tokens need a newer transformers
            continue
        for name in required[1].split(", ") if required else []:
            names[name] = provide(name, tmp_path / f"{number}-{name}")
        for model_id, save in HUB.items():
            if model_id in block:
                block = block.replace(model_id, str(save(tmp_path / f"{number}-hub")))
        exec(compile(block, f"{page}, Python block {number}", "exec"), names)


def test_the_readmes_figures_are_measured() -> None:
    """Its table is of other reports than any page's, and is written by hand."""
    text = (ROOT / "README.md").read_text("utf-8")
    reports = read_reports(ROOT / "benchmarks" / "results")
    screen = reports["first-screen"]["first_screen"]
    image = next(row for row in screen if row["policy"] == "jacobi")
    texts = reports["text-kinds-smollm2-cpu"]["text_drafts"]
    drafted = [row for row in texts if row["way"] == "Jacobi()"]
    looked_up = [row for row in texts if row["way"] == "transformers, prompt lookup"]
    rows = [(image["tokens_per_pass"], image["speed_up"])]
    for report, policy in (
        ("moving-scenes-speed-cpu", "Jacobi(window=32, drafts='previous-frame')"),
        ("voices-speed-cpu", "Jacobi(window=8, drafts='neighbour')"),
    ):
        row = next(row for row in reports[report]["media_speed"] if row["policy"] == policy)
        rows.append((row["tokens_a_pass"], row["times"]))
    rows.append((drafted[0]["tokens_a_pass"], drafted[0]["times"]))
    assert re.findall(r"\| ([\d.]+) \| ([\d.]+) \|", text) == [
        (f"{tokens:.2f}", f"{times:.2f}") for tokens, times in rows
    ]
    ranges = [(min(times), max(times)) for times in (
        [row["times"] for row in side] for side in (drafted, looked_up)
    )]  # fmt: skip
    said = re.findall(r"([\d.]+)\s+to\s+([\d.]+)\s+times", text)
    assert said == [(f"{low:.2f}", f"{high:.2f}") for low, high in ranges]


def test_the_readme_fits_a_screen() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 70 and max(map(len, lines)) <= 100
