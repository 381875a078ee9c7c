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
    _case("TextToImage", "model", '""', "model: expected a folder", "received None"),
    _case("LoadModel", "decoder", "/no/file", "decoder: expected a file", "'/no/file'"),
    _case("LoadSpeechModel", "codec", "none", "codec: expected a folder"),
    _case("LoadSpeechModel", "family", "bark", "family: expected one of", "'bark'"),
    _case("TextToImage", "policy", "best", "policy: expected one of auto, autoregressive"),
    _case("GenerateImage", "temperature", -0.5, "temperature: expected", "-0.5"),
    _case("GenerateImage", "top_p", 0.0, "top_p: expected", "0.0"),
    _case("GenerateImage", "min_p", float("nan"), "min_p: expected a number in -1..1"),
    _case("GenerateImage", "seed", 2**64, "seed: expected an integer in -1..", str(2**64)),
    _case("Compare", "num_images", 65, "num_images: expected an integer in 0..64"),
    _case("AnswerQuestion", "batch_size", True, "batch_size: expected an integer in 1..256"),
    _case("VisualTokens", "keep", 0.0, "DART.keep: expected a number in (0, 1], received 0"),
    _case("VisualTokens", "method", "best", "method: expected one of downsample"),
    _case("FastvVisualTokens", "layer", 0, "FastV: layer: expected an integer >= 1", "received 0"),
    _case("AdaptiveBlockPolicy", "delimiters", "x", "delimiters: expected a list", "x"),
    _case("JacobiPolicy", "window", 4097, "window: expected an integer in 0..4096"),
)
