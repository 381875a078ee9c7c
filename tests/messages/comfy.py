"""Values of widgets that a node refuses before anything is loaded or runs."""

from __future__ import annotations

from typing import Any

from mmaccel.comfy.nodes import NODES
from tests.messages.case import Refused


def _case(node: str, name: str, value: Any, *says: str) -> Refused:
    made = NODES[f"MMAccel{node}"]
    return Refused(f"{node} with {name} {value!r}", lambda: made.read({name: value}), says)


CASES = (
    *(
        _case(node, "model", "none", "model: expected a folder", "'none'")
        for node in ("LoadModel", "LoadSpeechModel", "LoadVideoModel", "LoadVisionModel")
    ),
    _case("LoadModel", "decoder", "/no/file", "decoder: expected a file", "'/no/file'"),
    _case("LoadSpeechModel", "family", "bark", "family: expected one of", "'bark'"),
    _case("TextToImage", "policy", "best", "policy: expected one of auto, autoregressive"),
    _case("AnswerQuestion", "batch_size", True, "batch_size: expected an integer in 1..256"),
    _case("VisualTokens", "method", "best", "method: expected one of downsample"),
    _case("AdaptiveBlockPolicy", "delimiters", "x", "delimiters: expected a list", "x"),
)
