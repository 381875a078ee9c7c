"""A real ComfyUI: its executor in one process, and its server over HTTP and websocket.

They run where COMFYUI_PATH names the folder of one (0.8 was used), in the Python that
COMFYUI_PYTHON names, which has what ComfyUI and mmaccel need.
"""

from __future__ import annotations

import copy
import json
import subprocess
import time
import wave
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmaccel.cli import main
from mmaccel.comfy.nodes import NODES
from mmaccel.pipelines.image_to_video.pipeline import ImageToVideo
from tests.comfy.comfy_server import HOME, PYTHON, WORKFLOWS, environment, make_base, running
from tests.fixtures.speech import TEXTS, build_speech
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS
from tests.fixtures.video import build_video

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not HOME, reason="COMFYUI_PATH names no ComfyUI")

Graph = dict[str, Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("pack") / "base")


@pytest.fixture(scope="module")
def talk(base: Path) -> Iterator[Callable[..., Any]]:
    """A running server; a call sends it jobs and returns what `http_driver.py` found."""
    with running(base) as url:
        yield partial(send, url)


def send(url: str, *jobs: dict[str, Any]) -> Any:
    done = subprocess.run(
        [PYTHON, str(HERE / "http_driver.py"), url], input=json.dumps(jobs), text=True,
        capture_output=True, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read_graph(name: str) -> Graph:
    graph: Graph = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    return graph


def tiny_graph(name: str, folder: Path, **generate: Any) -> Graph:
    """An example workflow with the tiny model."""
    graph = read_graph(name)
    graph["1"]["inputs"]["model"] = str(folder)
    graph["3"]["inputs"] |= {"prompt": "\n".join(CAPTIONS[:2]), **generate}
    return graph


def made_files(base: Path, result: dict[str, Any], node: str = "4") -> list[Path]:
    images = result["history"]["outputs"][node]["images"]
    return [base / "output" / image["subfolder"] / image["filename"] for image in images]


def test_every_node_is_listed_and_the_templates_too(talk: Any, base: Path) -> None:
    found = talk()
    assert set(found["object_info"]) == set(NODES)
    for name, node in found["object_info"].items():
        inputs = {**node["input"]["required"], **node["input"].get("optional", {})}
        assert set(inputs) == {entry.name for entry in NODES[name].inputs}
        assert node["display_name"] == NODES[name].title
        assert node["output"] == [output.kind for output in NODES[name].outputs]
    log = (base / "server.log").read_text(encoding="utf-8")
    assert not [line for line in log.splitlines() if "mmaccel" in line and "IMPORT FAILED" in line]
    if (base / "custom_nodes" / "mmaccel-nodes" / "example_workflows").is_dir():
        names = {file.stem for file in WORKFLOWS.glob("*.json")}
        assert set(found["templates"]["mmaccel-nodes"]) == names


def test_a_workflow_makes_the_command_lines_pixels(
    talk: Any, base: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    graph = tiny_graph("mmaccel_generate", tiny_folder, seed=11, num_images=3)
    graph["2"]["inputs"]["window"] = 5
    first, again = talk({"graph": graph}, {"graph": graph})["jobs"]
    assert [event[0] for event in first["events"]][-1] == "execution_success"
    files = made_files(base, first)
    arguments = ["generate", *CAPTIONS[:2], "-n", "3", "--seed", "11", "--window", "5"]
    assert main([*arguments, "--model", str(tiny_folder), "--out", str(tmp_path)]) == 0
    ours = sorted(tmp_path.glob("0*.png"))
    assert len(files) == len(ours) == 6
    for theirs, own in zip(files, ours):
        with Image.open(theirs) as a, Image.open(own) as b:
            assert list(a.get_flattened_data()) == list(b.get_flattened_data())
            assert json.loads(a.text["prompt"])["3"]["inputs"]["seed"] == 11
    (text,) = first["history"]["outputs"]["5"]["text"]
    assert "bitwise: same seed, same tokens" in text and f"seed 13: {N_TOKENS} tokens in" in text
    cached = next(data for name, data, _ in again["events"] if name == "execution_cached")
    assert set(cached["nodes"]) >= {"1", "2", "3"}  # nothing is made twice


def test_one_node_makes_the_same_and_its_model_stays_loaded(
    talk: Any, base: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    graph = read_graph("mmaccel_text_to_image")
    graph["1"]["inputs"] |= {"model": str(tiny_folder), "prompt": CAPTIONS[0], "policy": "mc-sjd"}
    graph["1"]["inputs"].pop("negative_prompt")  # it is optional
    other = copy.deepcopy(graph)
    other["1"]["inputs"]["seed"] += 1
    first, again, cached = talk({"graph": graph}, {"graph": other}, {"graph": other})["jobs"]
    options = ["--model", str(tiny_folder), "--policy", "mc-sjd", "--out", str(tmp_path)]
    assert main(["generate", CAPTIONS[0], "-n", "2", "--seed", "7", *options]) == 0
    for result, own in zip((first, again), sorted(tmp_path.glob("0*.png")), strict=True):
        assert result["events"][-1][0] == "execution_success", result["events"][-1]
        (theirs,) = made_files(base, result, "2")
        with Image.open(theirs) as a, Image.open(own) as b:
            assert list(a.get_flattened_data()) == list(b.get_flattened_data())

    def ran(result: dict[str, Any]) -> list[str]:
        """Ids of nodes that ran. Those that the first node runs are shown at its place."""
        events = [data for name, data, _ in result["events"] if name == "executing"]
        assert {data["display_node"] for data in events if data["node"]} <= {"1", "2"}
        return sorted({data["node"] for data in events if data["node"]})

    inner = ["1.0.0.1", "1.0.0.2", "1.0.0.3"]  # load, generate, policy
    assert ran(first) == ["1", *inner, "2"]
    assert ran(again) == ["1", "1.0.0.2", "2"]
    assert ran(cached) == []


def test_one_node_shows_previews_and_can_be_interrupted(talk: Any, base: Path) -> None:
    graph = read_graph("mmaccel_text_to_image")
    graph["1"]["inputs"] |= {"policy": "autoregressive", "seed": time.time_ns() % 2**32}
    slow = copy.deepcopy(graph)
    slow["1"]["inputs"] |= {"num_images": 64, "seed": 1 + time.time_ns() % 2**32}
    shown, stopped, after = talk(
        {"graph": graph}, {"graph": slow, "interrupt": True}, {"graph": graph}
    )["jobs"]
    assert shown["events"][-1][0] == "execution_success" and shown["previews"] > 0
    assert stopped["events"][-1][0] == "execution_interrupted"
    assert stopped["history"]["outputs"] == {} and stopped["interrupted_after"] < 60
    assert after["events"][-1][0] == "execution_success"


def test_a_graph_with_the_old_names_runs(talk: Any, base: Path, tiny_folder: Path) -> None:
    new = tiny_graph("mmaccel_generate", tiny_folder, num_images=2, guidance_scale=3.0)
    new["3"]["inputs"]["negative_prompt"] = CAPTIONS[2]
    old = copy.deepcopy(new)
    inputs = old["3"]["inputs"]
    inputs |= {"count": inputs.pop("num_images"), "negative": inputs.pop("negative_prompt")}
    results = talk({"graph": new}, {"graph": old})["jobs"]
    files = [made_files(base, result) for result in results]
    assert [len(made) for made in files] == [4, 4] and files[0] != files[1]
    for ours, theirs in zip(*files):
        with Image.open(ours) as a, Image.open(theirs) as b:
            assert list(a.get_flattened_data()) == list(b.get_flattened_data())


def test_a_comparison_is_saved(talk: Any, base: Path, tiny_folder: Path) -> None:
    (result,) = talk({"graph": tiny_graph("mmaccel_compare", tiny_folder)})["jobs"]
    (sheet,) = made_files(base, result)
    with Image.open(sheet) as opened:
        assert opened.width > 2 * 240
    (text,) = result["history"]["outputs"]["5"]["text"]
    assert "compared     The same images, token for token" in text


_READ = """
import json, sys, av
sound = av.open(sys.argv[1])
rate = sound.streams.audio[0].rate
frames = [frame.to_ndarray().astype("float64") for frame in sound.decode(audio=0)]
scale = {"s16": 2**15, "s16p": 2**15, "s32": 2**31, "s32p": 2**31}
scale = scale.get(sound.streams.audio[0].format.name, 1)
print(json.dumps([rate, [x / scale for frame in frames for x in frame.reshape(-1).tolist()]]))
"""


def test_speech_is_the_command_lines(talk: Any, base: Path, tmp_path: Path) -> None:
    model, codec = build_speech("llasa", tmp_path)
    graph: Graph = json.loads(
        (WORKFLOWS / "api" / "mmaccel_speech.json").read_text(encoding="utf-8")
    )
    graph["1"]["inputs"] |= {"model": str(model), "codec": str(codec)}
    graph["3"]["inputs"] |= {"text": TEXTS[0], "seed": 11, "max_seconds": 0.05}
    (result,) = talk({"graph": graph})["jobs"]
    assert result["events"][-1][0] == "execution_success", result["events"][-1]
    (saved,) = result["history"]["outputs"]["4"]["audio"]
    file = base / "output" / saved["subfolder"] / saved["filename"]
    done = subprocess.run(
        [PYTHON, "-c", _READ, str(file)], text=True, capture_output=True, check=True
    )
    rate, samples = json.loads(done.stdout)
    arguments = ["speak", TEXTS[0], "--seed", "11", "--max-seconds", "0.05"]
    arguments += ["--model", str(model), "--codec", str(codec), "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    with wave.open(str(next((tmp_path / "out").glob("*.wav")))) as own:
        assert own.getframerate() == rate == 16000
        wanted = np.frombuffer(own.readframes(own.getnframes()), "<i2") / 2**15
    assert len(samples) == len(wanted) and np.abs(np.array(samples) - wanted).max() < 3 / 2**15
    (text,) = result["history"]["outputs"]["5"]["text"]
    assert "bitwise: same seed, same tokens" in text and "seed 11: " in text


_READ_VIDEO = """
import hashlib, json, sys, av
video = av.open(sys.argv[1])
frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
rate = float(video.streams.video[0].average_rate)
print(json.dumps([rate, len(frames), [frame.mean(axis=(0, 1)).tolist() for frame in frames]]))
"""


def test_video_is_the_command_lines(talk: Any, base: Path, tmp_path: Path) -> None:
    model, codec = build_video(tmp_path)
    values = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    (base / "input").mkdir(exist_ok=True)
    Image.fromarray(values).save(base / "input" / "start.png")
    graph: Graph = json.loads(
        (WORKFLOWS / "api" / "mmaccel_video.json").read_text(encoding="utf-8")
    )
    graph["1"]["inputs"] |= {"model": str(model), "codec": str(codec)}
    graph["3"]["inputs"]["seed"] = 11
    graph["7"]["inputs"]["image"] = "start.png"
    (result,) = talk({"graph": graph})["jobs"]
    assert result.get("events") and result["events"][-1][0] == "execution_success", result
    (saved,) = result["history"]["outputs"]["4"]["images"]
    file = base / "output" / saved["subfolder"] / saved["filename"]
    done = subprocess.run(
        [PYTHON, "-c", _READ_VIDEO, str(file)], text=True, capture_output=True, check=True
    )
    rate, n_frames, means = json.loads(done.stdout)
    pipe = ImageToVideo.from_pretrained(model, codec=codec)
    clip = pipe(Image.fromarray(values), seed=11)[0]
    assert (rate, n_frames) == (25.0, 17)
    wanted = clip.frames.float().mean((1, 2)).numpy()
    assert np.abs(np.array(means) - wanted).max() < 6 < np.abs(wanted[0] - wanted[-1]).max()
    (text,) = result["history"]["outputs"]["5"]["text"]
    assert "bitwise: same seed, same tokens" in text and "seed 11: 17 frames, 1 of them" in text


def bad_graphs(folder: Path) -> dict[str, tuple[Graph, str, str]]:
    """What is wrong -> graph, node that must complain, and what it must say."""
    window = tiny_graph("mmaccel_generate", folder)
    window["2"]["inputs"]["window"] = 5000
    drafts = tiny_graph("mmaccel_generate", folder)
    drafts["2"]["inputs"]["drafts"] = "nonsense"
    top_p = tiny_graph("mmaccel_generate", folder, top_p=1.5)
    model = tiny_graph("mmaccel_generate", Path("no-such-model"))
    wrong = tiny_graph("mmaccel_generate", folder)
    wrong["3"]["inputs"]["policy"] = ["1", 0]
    return {
        "window": (window, "2", "window: expected an integer in 1..4096"),
        "drafts": (drafts, "2", "drafts: expected one of auto, coarse"),
        "top_p": (top_p, "3", "top_p"),
        "model": (model, "1", "model: expected a folder, a file, an id of the Hugging Face hub"),
        "socket": (wrong, "3", "received_type(MMACCEL_MODEL) mismatch input_type(MMACCEL_POLICY)"),
    }


@pytest.mark.parametrize("what", ["window", "drafts", "top_p", "model", "socket"])
def test_a_bad_value_is_refused_before_anything_runs(
    what: str, talk: Any, tiny_folder: Path
) -> None:
    graph, node, said = bad_graphs(tiny_folder)[what]
    (result,) = talk({"graph": graph})["jobs"]
    assert result["status"] == 400 and result["events"] == []
    errors = result["answer"]["node_errors"][node]["errors"]
    assert any(said in error["details"] for error in errors)


def test_what_only_the_model_knows_is_said_in_its_node(talk: Any, tiny_folder: Path) -> None:
    graph = tiny_graph("mmaccel_generate", tiny_folder, prompt="a red xylophone")
    missing = tiny_graph("mmaccel_generate", Path("owner/name"))
    unknown, absent = talk({"graph": graph}, {"graph": missing})["jobs"]
    name, data, _ = unknown["events"][-1]
    assert name == "execution_error" and data["node_id"] == "3"
    assert "received 'xylophone'" in data["exception_message"]
    name, data, _ = absent["events"][-1]
    assert name == "execution_error" and data["node_id"] == "1"
    assert "received 'owner/name'" in data["exception_message"]


def test_an_interrupt_ends_the_run_and_the_next_one_runs(
    talk: Any, base: Path, tiny_folder: Path
) -> None:
    slow = tiny_graph("mmaccel_generate", Path("scenes"), prompt="a red circle on grass")
    slow["2"] = {"class_type": "MMAccelAutoregressivePolicy", "inputs": {}}
    slow["3"]["inputs"] |= {"num_images": 64, "batch_size": 1, "seed": time.time_ns() % 2**32}
    after = copy.deepcopy(tiny_graph("mmaccel_generate", tiny_folder, seed=5))
    before = set((base / "output").iterdir())
    stopped, next_one = talk({"graph": slow, "interrupt": True}, {"graph": after})["jobs"]
    names = [name for name, _, _ in stopped["events"]]
    assert names[-1] == "execution_interrupted" and stopped["history"]["outputs"] == {}
    print(f"interrupt honoured after {stopped['interrupted_after']:.3f} s")
    said = [data["nodes"]["3"]["value"] for name, data, _ in stopped["events"]
            if name == "progress_state" and "3" in data["nodes"]]  # fmt: skip
    assert 0 < max(said) < 64 * 256
    assert next_one["events"][-1][0] == "execution_success"
    assert set((base / "output").iterdir()) - before == set(made_files(base, next_one))


def test_previews_reach_the_page(talk: Any) -> None:
    graph = tiny_graph("mmaccel_generate", Path("scenes"), prompt="a red circle on grass")
    graph["2"] = {"class_type": "MMAccelAutoregressivePolicy", "inputs": {}}
    graph["3"]["inputs"]["seed"] = time.time_ns() % 2**32
    (result,) = talk({"graph": graph})["jobs"]
    assert result["events"][-1][0] == "execution_success" and result["previews"] > 0


def test_the_executor_alone(base: Path, tiny_folder: Path) -> None:
    graph = tiny_graph("mmaccel_generate", tiny_folder, num_images=2)
    graph["2"] = {"class_type": "MMAccelAutoregressivePolicy", "inputs": {}}
    bad, stop_at = bad_graphs(tiny_folder)["window"][0], 5
    done = subprocess.run(
        [PYTHON, str(HERE / "executor_driver.py"), HOME, str(base)], text=True, check=False,
        input=json.dumps({"graph": graph, "bad": bad, "stop_at": stop_at}),
        capture_output=True, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert set(found["nodes"]) == set(NODES)
    ended = {name: [m[0] for m in found[name]["messages"]][-1] for name in ("first", "stopped")}
    assert ended == {"first": "execution_success", "stopped": "execution_interrupted"}
    assert len(found["first"]["outputs"]["4"]["images"]) == 2 * 2  # of each prompt
    cached = dict(found["second"]["messages"])["execution_cached"]["nodes"]
    assert set(cached) >= {"1", "2", "3"}
    assert found["bad"]["valid"] is False and found["bad"]["node_errors"]["2"]
    assert found["inference"] is False
    assert found["passes"] == stop_at  # none is begun after the one in which it was asked for
    assert dict(found["stopped"]["messages"])["execution_interrupted"]["node_id"] == "3"
    assert [m[0] for m in found["after"]["messages"]][-1] == "execution_success"
    assert found["cached"] == 0  # the model goes with ComfyUI's cache
