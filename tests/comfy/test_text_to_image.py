"""The node of a first graph: what the other nodes make, through the other nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmaccel.comfy.loading import LoadedModel
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.schemas import node_class
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from tests.comfy.comfy_server import WORKFLOWS
from tests.comfy.fake_comfy import Host, policy, run, run_graph
from tests.fixtures.tiny_model import CAPTIONS, build_tiny

NODE = "MMAccelTextToImage"


def ask(model: str, host: Host | None = None, cache: Any = None, **values: Any) -> Any:
    """The outputs of the node, alone in a graph."""
    inputs = {"model": model, "prompt": CAPTIONS[0], "seed": 0, "policy": "auto", **values}
    graph = {"9": {"class_type": NODE, "inputs": inputs}}
    return run_graph(graph, "9", host or Host(), {} if cache is None else cache)


@pytest.mark.parametrize(
    ("name", "node"), [("auto", None), ("autoregressive", "Autoregressive"), ("mc-sjd", "McSjd")]
)
def test_images_are_the_other_nodes(name: str, node: str | None, model: LoadedModel) -> None:
    chosen = None if node is None else policy(node)
    values = dict(negative_prompt=CAPTIONS[2], num_images=2, guidance_scale=3.0, seed=7)
    values["prompt"] = "\n".join(CAPTIONS[:2])
    wanted, record = run("GenerateImage", model=model, policy=chosen, **values).values
    images, stats = ask(model.name, policy=name, **values)
    assert torch.equal(images, wanted) and len(images) == 4
    assert stats.chosen.name == ("jacobi" if node is None else name)
    assert stats.stats.passes == record.stats.passes and stats.model is model


def test_the_example_runs(tiny_folder: Path) -> None:
    text = (WORKFLOWS / "api" / "mmaccel_text_to_image.json").read_text(encoding="utf-8")
    graph = json.loads(text)
    assert [node["class_type"] for node in graph.values()] == [NODE, "SaveImage"]
    graph["1"]["inputs"] |= {"model": str(tiny_folder), "prompt": CAPTIONS[0]}
    source, slot = graph["2"]["inputs"]["images"]
    images = run_graph(graph, source, Host(), {})[slot]
    assert images.shape == (1, 16, 16, 3) and images.dtype == torch.float32


@pytest.mark.usefixtures("comfy")
def test_the_model_is_loaded_once_and_again_when_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, loaded, cache = build_tiny(tmp_path / "m"), [], {}
    real = TextToImage.from_pretrained

    def load(*values: Any, **options: Any) -> Any:
        loaded.append(values)
        return real(*values, **options)

    monkeypatch.setattr(TextToImage, "from_pretrained", load)
    cls: Any = node_class(NODES[NODE])
    first, other = (ask(str(folder), cache=cache, seed=seed)[0] for seed in (1, 2))
    assert len(loaded) == 1 and not torch.equal(first, other)
    assert sum("MMAccelLoadModel" in key[:20] for key in cache) == 1  # ComfyUI keeps its output
    state = cls.fingerprint_inputs(model=str(folder), width=0, seed=3)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    assert cls.fingerprint_inputs(model=str(folder), width=0, seed=3) != state != ""
    assert cls.fingerprint_inputs(model="owner/name") == ""
    drawn = {cls.fingerprint_inputs(model="owner/name", seed=-1) for _ in range(3)}
    assert len(drawn) == 3  # ComfyUI runs it again


@pytest.mark.usefixtures("comfy")
def test_the_graph_is_handed_to_comfyui() -> None:
    values = dict(model="scenes", prompt=CAPTIONS[0], seed=3, policy="jacobi")
    cls: Any = node_class(NODES[NODE])
    required = [entry.id for entry in cls.GET_SCHEMA().inputs if not entry.options["optional"]]
    assert required == ["model", "prompt", "seed", "policy"]
    output = cls.execute(**values)
    graph, links = output.expand, output.args
    load, make, chosen = graph
    assert links == ([make, 0], [make, 1])
    assert [node["class_type"] for node in graph.values()] == [
        "MMAccelLoadModel",
        "MMAccelGenerateImage",
        "MMAccelJacobiPolicy",
    ]
    inputs = graph[make]["inputs"]
    assert (inputs["model"], inputs["policy"], inputs["seed"]) == ([load, 0], [chosen, 0], 3)
    assert graph[load]["inputs"] == {"model": "scenes", "width": 0, "height": 0}
