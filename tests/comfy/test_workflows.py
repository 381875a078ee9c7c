"""The example workflows are written from the table of nodes, which takes their values."""

from __future__ import annotations

import json

from mmaccel.comfy.nodes import NODES
from scripts.update_comfy import generated_files
from tests.architecture.source import ROOT


def test_files_are_written_from_the_table() -> None:
    for name, text in generated_files().items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, "run scripts/update_comfy.py"
        for step in json.loads(text).values() if "/api/" in name else ():
            node = NODES.get(step["class_type"])
            if node is None:  # ComfyUI's own
                continue
            given = step["inputs"]
            links = {key for key, value in given.items() if isinstance(value, list)}
            known = {port.name for port in node.links}
            needed = {port.name for port in node.links if not port.is_optional}
            assert needed <= links <= known
            values = {key: value for key, value in given.items() if key not in links}
            assert set(values) == {port.name for port in node.widgets}
            assert node.refusal(values) is None
