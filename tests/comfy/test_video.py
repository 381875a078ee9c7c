"""Video nodes at work: the command line's frames, interrupts, progress, bad values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel.cli import main
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.open_animator import OpenAnimator
from mmaccel.comfy.v1 import v1_class
from mmaccel.comfy.v3 import v3_class
from mmaccel.comfy.values import refusal
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.image_to_video import ImageToVideo
from tests.comfy.fake_comfy import Interrupted, install
from tests.comfy.test_running import Host, policy, run
from tests.video_beds import build_video


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_video(tmp_path_factory.mktemp("cosmos"))


@pytest.fixture
def animator(parts: tuple[Path, Path]) -> OpenAnimator:
    return load(parts).values[0]


@pytest.fixture
def start() -> torch.Tensor:
    values = np.random.default_rng(0).integers(0, 256, (1, 32, 48, 3), dtype=np.uint8)
    return torch.from_numpy(values).float() / 255


def load(parts: tuple[Path, Path], host: Host | None = None) -> Any:
    return run("LoadVideoModel", host, model=str(parts[0]), codec=f'"{parts[1]}"')


def make(animator: OpenAnimator, host: Host | None = None, **values: Any) -> Any:
    return run("GenerateVideo", host, video_model=animator, **({"seed": 7} | values))


def test_frames_are_the_command_lines(
    animator: OpenAnimator, parts: tuple[Path, Path], start: torch.Tensor, tmp_path: Path
) -> None:
    (video, fps), frames, record = make(
        animator, start=start, policy=policy("Jacobi", window=5)
    ).values
    Image.fromarray((start[0] * 255).round().byte().numpy()).save(tmp_path / "a.png")
    arguments = ["animate", str(tmp_path / "a.png"), "--seed", "7", "--format", "webp"]
    arguments += ["--model", str(parts[0]), "--codec", str(parts[1]), "--out", str(tmp_path)]
    assert main(arguments) == 0
    (file,) = tmp_path.glob("*.webp")
    theirs = []
    with Image.open(file) as opened:
        for page in range(getattr(opened, "n_frames", 1)):
            opened.seek(page)
            frame = torch.from_numpy(np.asarray(opened.convert("RGB")).copy())
            theirs += [frame] * (opened.info["duration"] // 40)
    assert frames.shape == (17, 32, 48, 3) and frames.dtype == torch.float32
    assert torch.equal((frames * 255).round().byte(), torch.stack(theirs))
    assert torch.equal(video, frames) and fps == 25.0
    text = run("Stats", stats=record).text
    assert "policy       jacobi" in text and "bitwise: same seed, same tokens" in text
    assert "seed 7: 17 frames, 1 of them given, 25 a second, " in text


def test_fields_reach_the_pipeline(animator: OpenAnimator, start: torch.Tensor) -> None:
    base = make(animator, start=start).values[1]
    more = torch.rand(12, 20, 30, 4, generator=torch.Generator().manual_seed(1))
    for change in (dict(seed=8), dict(temperature=0.2), dict(top_k=2), dict(top_p=0.3),
                   dict(start=1 - start), dict(start=more)):  # fmt: skip
        other = make(animator, **({"start": start} | change)).values[1]
        assert not torch.equal(other, base), change
    same = make(animator, start=start, temperature=1.0, top_p=0.8, top_k=0)
    assert torch.equal(same.values[1], base)
    bright = torch.cat((start, torch.zeros(1, 32, 48, 1)), -1) + 1e-7  # what nodes before may make
    assert torch.equal(make(animator, start=bright).values[1], base)
    assert "9 of them given" in run("Stats", stats=make(animator, start=more).values[2]).text


def test_no_pass_is_begun_once_the_interrupt_was_seen(
    animator: OpenAnimator, start: torch.Tensor
) -> None:
    passes: list[object] = []
    window: Any = animator.pipe.model
    hook = window.model.register_forward_pre_hook(lambda *_: passes.append(_))
    try:
        with pytest.raises(Interrupted):
            make(animator, Host(stop_at=4), start=start, policy=policy("Autoregressive"))
    finally:
        hook.remove()
    assert len(passes) == 1 + 3  # the prompt's; the first check is before any
    assert make(animator, start=start)  # and the model is free


def test_progress_ends_full(
    animator: OpenAnimator, start: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, least in ((-1.0, 12), (1e9, 1)):
        host = Host()
        monkeypatch.setattr("mmaccel.comfy.video._REPORT", seconds)
        make(animator, host, start=start, policy=policy("Autoregressive"))
        done = [report[:2] for report in host.reports]
        assert done == [(k, 12) for k in range(13 - least, 13)]


def test_what_can_be_seen_to_be_wrong_is_refused_before_anything_is_loaded(
    parts: tuple[Path, Path],
) -> None:
    spec, model = NODES["MMAccelLoadVideoModel"], str(parts[0])
    assert refusal(spec, {"model": model}) is None
    assert refusal(spec, {}) is None  # an id of the hub, which only asking it can tell
    for values, said in (
        ({"model": "none"}, "model: expected a folder"),
        ({"model": model, "codec": "none"}, "codec: expected a folder"),
        ({"model": model, "device": "cuda", "cuda_graphs": "on"}, "device: expected"),
    ):
        refused = refusal(spec, values)
        assert refused is not None and said in refused
    node = NODES["MMAccelGenerateVideo"]
    assert refusal(node, {}) is None
    for values, said in (
        ({"temperature": -0.5}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 2**64}, "seed"),
    ):
        refused = refusal(node, values)
        assert refused is not None and said in refused, values


def test_what_only_the_model_knows_is_said_in_its_node(
    parts: tuple[Path, Path], animator: OpenAnimator, start: torch.Tensor
) -> None:
    with pytest.raises(OptionError, match="policy: expected one of"):
        make(animator, start=start, policy=policy("EntropyBounded"))
    with pytest.raises(UnsupportedModelError, match="expected a folder with model.pt"):
        load((parts[1], parts[1]))
    with pytest.raises(UnsupportedModelError, match="received no encoder.jit"):
        load((parts[0], parts[0]))


def test_a_model_is_loaded_once_and_again_when_its_files_change(
    parts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, dict[str, Any]]] = []

    def open_pipe(name: Any, **options: Any) -> Any:
        asked.append((name, options))
        return object()

    monkeypatch.setattr(ImageToVideo, "from_pretrained", open_pipe)
    host = Host()
    model, codec = map(str, parts)
    chosen = dict(model=model, codec=codec, dtype="bfloat16", cuda_graphs="off")
    first = run("LoadVideoModel", host, **chosen).values[0]
    wanted = dict(codec=codec, device="cpu", dtype=torch.bfloat16, cuda_graphs=False)
    assert asked == [(model, wanted)]
    assert run("LoadVideoModel", host, **chosen).values[0] is first
    ((size, device),) = host.room
    files = [parts[0] / "model.pt", *parts[1].glob("*.jit")]
    assert device == "cpu" and size >= sum(file.stat().st_size for file in files)
    (parts[1] / "decoder.jit").touch()
    assert run("LoadVideoModel", host, **chosen).values[0] is not first and len(asked) == 2


def test_first_schema_makes_comfyuis_video(
    parts: tuple[Path, Path], start: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    comfy = install(monkeypatch, with_v3=False)
    loader = v1_class(NODES["MMAccelLoadVideoModel"])
    node = v1_class(NODES["MMAccelGenerateVideo"])
    assert node.RETURN_TYPES == ("VIDEO", "IMAGE", "MMACCEL_STATS")  # type: ignore[attr-defined]
    (animator,) = loader().execute(model=str(parts[0]), codec=str(parts[1]))  # type: ignore[attr-defined]
    video, frames, _ = node().execute(video_model=animator, start=start, seed=7)  # type: ignore[attr-defined]
    assert torch.equal(video.images, frames) and video.frame_rate == 25 and video.audio is None
    assert comfy.reports[-1][0] == comfy.reports[-1][1]


def test_third_schema_has_the_native_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, with_v3=True)
    schema = v3_class(NODES["MMAccelGenerateVideo"]).define_schema()
    kinds = [output.io_type for output in schema.outputs]
    assert kinds == ["VIDEO", "IMAGE", "MMACCEL_STATS"]
