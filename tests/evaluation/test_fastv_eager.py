"""`benchmarks/fastv_eager.py` on a tiny model: all ways choose the same tokens, and nothing of them
stays behind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import fastv_eager
from benchmarks.report import fill_tables
from mmaccel.pipelines.attach.prompt_pass import PrefillPass
from mmaccel.pipelines.vision_language.layer_attention import LayerAttention, NotedLayers
from tests.fixtures.tiny_vlms import build_vlm, encodes_first

pytestmark = pytest.mark.skipif(
    not encodes_first(),
    reason="this transformers encodes images in its first pass",
)


def test_all_ways_choose_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastv_eager, "build_model", lambda _layers: build_vlm("llava_onevision"))
    before = LayerAttention.mass, NotedLayers.watchers, PrefillPass.run
    path = tmp_path / "report.json"
    fastv_eager.main(["--rounds", "2", "--visual-tokens", "60", "--json", str(path)])
    assert before == (LayerAttention.mass, NotedLayers.watchers, PrefillPass.run)
    report = json.loads(path.read_text())
    rows = {row["method"]: row for row in report["fastv_eager"]}
    assert list(rows) == list(fastv_eager.WAYS)
    assert all(row["same_choice"] == 1 and row["seconds"] > 0 for row in rows.values())
    table = fill_tables("<!-- table: fastv-eager -->\n<!-- end -->", {"one": report})
    assert table.count("×") == 4 and "map of one eager layer" in table


@torch.no_grad()
def test_maps_are_read_where_they_are_said_to_be_read() -> None:
    """A planted map: the way with maps keeps what the map says, the mass what the layer says."""
    model = build_vlm("llava_onevision")
    inputs = fastv_eager.draw_inputs(model, 40)
    method = fastv_eager.mmaccel.FastV(keep=0.1)
    attention, kept = model.get_decoder().layers[1].self_attn, {}

    def plant(_module: Any, _given: Any, made: Any) -> Any:
        if made[1] is None:  # sdpa has no map
            return made
        planted = torch.zeros_like(made[1])
        planted[..., -1, 8:12] = 1.0
        return made[0], planted

    hook = attention.register_forward_hook(plant)
    for way in fastv_eager.WAYS[1:]:
        kept[way] = fastv_eager.answer(model, way, method, inputs)[1]
    hook.remove()
    visual = {way: [c for c in own[0].tolist() if 8 <= c < 48] for way, own in kept.items()}
    assert visual[fastv_eager.ONE_MAP] == visual[fastv_eager.ALL_MAPS] == [8, 9, 10, 11]
    assert visual[fastv_eager.MASS] != [8, 9, 10, 11]
