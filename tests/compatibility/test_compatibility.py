"""docs/compatibility.md has a row for every family, and every cell is what a run gives.

Cells of policies and batches are compared in `test_matrix.py`, those of visual tokens in
`tests/vision_language/test_reducers.py`.
"""

from __future__ import annotations

import json

import pytest
import transformers

from benchmarks.report import fill_tables
from mmaccel.catalog import FAMILIES, IMAGE_MODELS, PIPELINES, SPEECH_MODELS
from mmaccel.pipelines.hosts.diffusion_lm.registry import FAMILIES as DENOISERS
from tests.architecture.source import ROOT
from tests.compatibility.measure import measure
from tests.compatibility.models import LMS, Row, rows

REPORT = json.loads((ROOT / "benchmarks/results/compatibility.json").read_text(encoding="utf-8"))
ROWS = list(rows())
WRAPPED = {"MaskedLM", "LuminaDenoiser"}  # denoisers that a user makes


def names(section: str, has_images: bool = False) -> set[str]:
    chosen = [row for row in ROWS if row.section == section]
    return {row.name for row in chosen if row.has_images or not has_images}


def test_every_family_has_a_row() -> None:
    readers = {name for name, target in FAMILIES.items() if target.endswith(":VisionLanguage")}
    assert names("attached", has_images=True) == readers | {"janus"}
    language = {"gemma3_text" if name == "gemma3" else name for name in LMS}
    others = {  # those of several codebooks have tests of their own: tests/depth, tests/delay
        name
        for name, target in FAMILIES.items()
        if ".depth." not in target and ".delay." not in target
    }
    assert names("attached") == others | language | {"emu3"}
    assert names("pipelines") == {*IMAGE_MODELS, *SPEECH_MODELS, "cosmos"} - {
        "voices",
        "voices-masked",
    }
    assert names("canvas") == {*DENOISERS, *PIPELINES, *WRAPPED}


def test_the_page_has_these_rows() -> None:
    recorded = [(row["section"], row["name"], row["title"]) for row in REPORT["compatibility"]]
    assert recorded == [(row.section, row.name, row.title) for row in ROWS]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section}-{row.title}-{row.name}")
def test_cells_are_what_a_run_gives(row: Row) -> None:
    transformers.logging.set_verbosity_error()
    recorded = REPORT["compatibility"][ROWS.index(row)]
    assert measure(row, ("cuda_graphs", "int8", "lora")).items() <= recorded.items()


def test_reasons_are_numbered_and_equal_rows_joined() -> None:
    row = {"section": "canvas", "title": "M", "source": "tests", "policy": "LosslessUnmask"}
    row |= {"batch": "yes", "visual_tokens": "-", "cuda_graphs": "eager", "int8": "-", "lora": "-"}
    other = row | {"name": "c", "title": "N", "cuda_graphs": "no device", "source": "stand-in"}
    report = {"command": "c", "machine": {"versions": {"torch": "2"}}}
    report["compatibility"] = [row | {"name": "a"}, row | {"name": "b"}, other]
    text = fill_tables("<!-- table: compatibility -->\n<!-- end -->", {"r": report, "other": {}})
    assert "| M | `a`, `b` | canvas | no (1) | - | yes | tests |" in text
    assert "| N | `c` | canvas | no (2) | - | yes | written for the tests |" in text
    assert "\n\n(1) eager; (2) no device.\n" in text
