"""What single nodes do: images and comparisons, graphs, answers, previews."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmaccel
from mmaccel import OptionError
from mmaccel.cli import main
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.progress import draw_progress
from mmaccel.comfy.schemas import node_class
from mmaccel.tokenizers_vq.grid import Grid
from tests.comfy.fake_comfy import FakeComfy, Interrupted, execute, policy, run
from tests.comfy.kinds import N_NEW, QUESTIONS, START, Kind, scenes
from tests.fixtures.next_scale import build_folder
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS, build_tiny, masked_beside_plain
from tests.fixtures.tiny_vqa import QUESTION, save_scenes
from tests.vision_language.runs import reduces


def test_prompts_are_lines_and_values_reach_the_command_lines_pixels(
    images: Kind, tmp_path: Path
) -> None:
    model = str(images.parts["model"])
    arguments = ["generate", CAPTIONS[0], "-n", "2", "--guidance", "3", "--negative", CAPTIONS[2]]
    assert main([*arguments, "--model", model, "--seed", "7", "--out", str(tmp_path)]) == 0
    wanted = [np.asarray(Image.open(file)) for file in sorted(tmp_path.glob("0*.png"))]
    named = dict(negative_prompt=f" {CAPTIONS[2]}\n", num_images=2, guidance_scale=3.0)
    pixels, stats = images.make(prompt=f"\n {CAPTIONS[0]} \n\n", **named)
    assert np.array_equal((pixels * 255).round().byte().numpy(), np.stack(wanted))
    assert f"negative     {CAPTIONS[2]}\n" in stats and f"seed 8: {N_TOKENS} tokens" in stats


def test_a_comparison_generates_both_sides_and_says_how_they_compare(
    images: Kind, comfy: FakeComfy
) -> None:
    asked = images.inputs | {"model": images.model, "batch_size": 2}
    sheet, plain, fast, stats = run("Compare", **asked, policy=policy("Jacobi", window=5))
    total = 2 * 2 * N_TOKENS
    assert comfy.reports[-1][:2] == (total, total)
    assert plain.shape == (2, 16, 16, 3) and torch.equal(plain, fast)
    assert torch.equal(plain, images.make(policy=policy("Autoregressive"))[0])
    assert sheet.shape[0] == 1 and sheet.shape[2] > 2 * 240
    assert "compared     The same images, token for token\n" in stats
    comfy.reset(stop_at=8)  # one before, six passes that warm up
    with pytest.raises(Interrupted):
        run("Compare", **asked)


def test_a_draft_model_is_used_and_is_another_one(images: Kind, tmp_path: Path) -> None:
    (draft,) = run("LoadModel", model=str(build_tiny(tmp_path)))
    chosen = policy("Speculative", draft_model=draft, window=4)
    assert chosen.policy.draft_model is draft.pipe.model
    assert "draft" in images.make(policy=chosen)[-1]
    with pytest.raises(OptionError, match="another model than the one that is decoded"):
        images.make(policy=policy("Speculative", draft_model=images.model))


def test_a_model_loaded_in_inference_mode_is_an_ordinary_one(tmp_path: Path) -> None:
    with torch.inference_mode():
        (opened,) = run("LoadModel", model=str(build_tiny(tmp_path)))
        pixels, _ = run("GenerateImage", model=opened, prompt=CAPTIONS[0])
    assert not any(p.is_inference() for p in opened.pipe.model.model.parameters())
    assert not pixels.is_inference()


def follow(graph: dict[str, Any], link: list[Any]) -> Any:
    """The output of a link of a graph in the API format."""
    node = graph[link[0]]
    values = {k: follow(graph, v) if isinstance(v, list) else v for k, v in node["inputs"].items()}
    return run(node["class_type"].removeprefix("MMAccel"), **values)[link[1]]


@pytest.mark.parametrize(
    ("name", "node"),
    [("auto", "Jacobi"), ("autoregressive", "Autoregressive"), ("mc-sjd", "McSjd")],
)
def test_one_node_runs_the_others(name: str, node: str, images: Kind) -> None:
    values = images.inputs | dict(negative_prompt=CAPTIONS[2], num_images=2, guidance_scale=3.0)
    wanted = images.make(**values, policy=policy(node))
    made = execute("TextToImage", model=images.model.name, policy=name, **values)
    pixels, stats = (follow(made.expand, link) for link in made.args)
    assert torch.equal(pixels, wanted[0]) and len(pixels) == 4
    assert stats.splitlines()[0] == wanted[1].splitlines()[0]
    kinds = [each["class_type"] for each in made.expand.values()]
    assert kinds == ["MMAccelLoadModel", "MMAccelGenerateImage"] + (
        [] if name == "auto" else [f"MMAccel{node}Policy"]
    )
    cls: Any = node_class(NODES["MMAccelTextToImage"])
    drawn = {cls.fingerprint_inputs(model="owner/name", seed=-1) for _ in range(3)}
    assert len(drawn) == 3 and cls.fingerprint_inputs(model="owner/name") == ""


def test_transparency_is_left_out_and_nine_frames_count(kind_of: Any) -> None:
    kind = kind_of("Video")
    bright = torch.cat((START, torch.zeros(1, 32, 48, 1)), -1) + 1e-7  # as other nodes return it
    assert torch.equal(kind.make(start=bright)[1], kind.make()[1])
    more = torch.rand(12, 20, 30, 4, generator=torch.Generator().manual_seed(1))
    assert "9 of them given" in kind.make(start=more)[-1]


def tokens(method: str = "", node: str = "VisualTokens", **values: Any) -> Any:
    chosen = {"method": method} if method else {}
    return run(node, **chosen, **values)[0]


@reduces
def test_fewer_visual_tokens_are_the_command_lines(
    vqa: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [str(file) for file in save_scenes(tmp_path)]
    asked = dict(image=scenes(0, 1), question=QUESTION, policy=policy("Jacobi", window=5), seed=3)
    reducer = tokens("dart", keep=0.25)
    text, kept, stats = vqa.make(**asked, visual_tokens=reducer, temperature=1.0)
    options = ["--visual-tokens", "dart", "--keep", "0.25", "--window", "5", "--seed", "3"]
    options += ["--temperature", "1", "--max-tokens", str(N_NEW), "-o", "a.png", "--json", "a.json"]
    model = str(vqa.parts["model"])
    assert main(["answer", *files, QUESTION, "--model", model, *options]) == 0
    report = json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert text == report["runs"][0]["text"]
    drawn = np.asarray(Image.open("a.png"))
    assert torch.equal((kept * 255).round().byte()[0], torch.from_numpy(drawn.copy()))
    assert "relaxed: the model on 260 of 1040 visual tokens after layer 2" in stats
    assert f"{QUESTION} {text} (cut): 260 of 1040 visual tokens, 6 tokens, " in stats
    _, kept, _ = vqa.make(visual_tokens=tokens("fastv", keep=0.3))
    assert kept.shape == (2, 528, 1024, 3) and not torch.equal(kept[0], kept[1])  # by question


def test_the_image_is_shown_where_all_of_it_stays(vqa: Kind) -> None:
    rgba = torch.cat([scenes(0), torch.zeros(1, 80, 80, 1)], -1) + 1e-7
    text, kept, _ = vqa.make(image=rgba, batch_size=2)
    assert len(text.split("\n")) == len(QUESTIONS.split("\n\n")) and torch.equal(kept, scenes(0))


def test_methods_of_stages_in_a_chain() -> None:
    first = tokens("hired", keep=0.5)
    both = tokens("fastv", n_keep=40, visual_tokens=first)
    assert both == (mmaccel.HiRED(keep=0.5), mmaccel.FastV(n_keep=40))
    with pytest.raises(OptionError, match="expected one method a stage"):
        tokens("divprune", keep=0.5, visual_tokens=first)
    own = tokens(node="HiredVisualTokens", keep=0.5, queries="all", scorer=tokens("evs"))
    assert own == (mmaccel.HiRED(keep=0.5, queries="all", scorer=mmaccel.EVS(keep=0.22)),)
    both = tokens(node="PyramidDropVisualTokens", layers="1, 2", visual_tokens=own)
    assert both[1] == mmaccel.PyramidDrop(keep=0.22, layers=(1, 2))
    with pytest.raises(OptionError, match="scorer: expected a TokenReducer"):
        tokens(node="HiredVisualTokens", scorer=both)


def previews_of(comfy: FakeComfy) -> list[Any]:
    """All but the finished images."""
    return [image for _, _, image in comfy.reports[:-1] if image is not None]


@pytest.mark.parametrize("word", ["Images", "masked"])
def test_previews_change_nothing(
    word: str, images: Kind, comfy: FakeComfy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = images.inputs | {"num_images": 2, "batch_size": 3, "policy": policy("Jacobi", window=2)}
    if word == "masked":
        (asked["model"],) = run("LoadModel", model=str(masked_beside_plain(tmp_path)[0]))
        asked["policy"] = None
    plain = images.make(**asked)
    clock = map(float, itertools.count())  # a second later at every look
    monkeypatch.setattr("mmaccel.comfy.progress.time.monotonic", lambda: next(clock))
    comfy.reset()
    shown = images.make(**asked)
    assert torch.equal(shown[0], plain[0])
    previews = previews_of(comfy)
    assert len(previews) > 2
    assert (128, 128, 128) in [colour for _, colour in previews[0].getcolors(10**4)]
    # what stays on the page is finished: all images, side by side
    last = np.asarray(comfy.reports[-1][2]).reshape(16, 4, 16, 3).transpose(1, 0, 2, 3)
    assert np.array_equal(last / np.float32(255), shown[0].numpy())


def test_scales_are_made_without_previews(
    images: Kind, comfy: FakeComfy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = images.inputs | {"num_images": 2, "batch_size": 3, "policy": None}
    (asked["model"],) = run("LoadModel", model=str(build_folder(tmp_path)))
    monkeypatch.setattr("mmaccel.comfy.progress._REPORT", -1.0)
    monkeypatch.setattr("mmaccel.comfy.progress._PREVIEW", -1.0)
    comfy.reset()
    made = images.make(**asked)
    assert made[0].shape == (4, 12, 12, 3) and "14 tokens in 3 forward passes" in made[-1]
    assert previews_of(comfy) == []


def test_a_preview_without_enough_memory_is_left_out(
    images: Kind, comfy: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def full(*values: Any) -> Any:
        asked.append(values)
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("mmaccel.comfy.progress._REPORT", -1.0)
    monkeypatch.setattr("mmaccel.comfy.progress._PREVIEW", -1.0)
    monkeypatch.setattr("mmaccel.comfy.media.draw_progress", full)
    images.make(policy=policy("Autoregressive"))
    assert len(asked) == 1
    assert previews_of(comfy) == []


class Painter:
    """Draws token t as two by two pixels of red t, and records the calls."""

    def __init__(self, rows: int = 3, width: int = 2, **options: Any) -> None:
        self.layout = Grid(rows, width, 100, **options)
        self.asked: list[Any] = []

    def render(self, tokens: torch.Tensor, prompts: Any, seeds: Any) -> list[Image.Image]:
        self.asked.append((tokens.tolist(), prompts, seeds))
        images = []
        for row in tokens.tolist():
            image = Image.new("RGB", (self.layout.columns, self.layout.rows))
            image.putdata([(t, 0, 0) for t in row])
            images.append(image.resize((2 * self.layout.columns, 2 * self.layout.rows)))
        return images


def window(tokens: list[list[int]], lengths: list[int]) -> Any:
    return SimpleNamespace(tokens=torch.tensor(tokens), lengths=torch.tensor(lengths))


def test_a_preview_shows_whole_rows_of_a_window_and_grey_below() -> None:
    painter: Any = Painter()
    progress = window([[11, 12, 13, 14, 88, 0], [0] * 6, [21, 22, 23, 0, 0, 0]], [5, 1, 3])
    shown = draw_progress(painter, progress, "abc", [7, 8, 9])
    assert shown is not None and shown.size == (8, 6)  # the second has no whole row yet
    # unknown cells repeat the nearest above
    wanted = [[11, 12, 13, 14, 13, 14], [21, 22, 21, 22, 21, 22]]
    assert painter.asked == [(wanted, ["a", "c"], [7, 9])]
    red = [[shown.getpixel((x, y)) for x in (0, 2, 4, 6)] for y in (0, 2, 4)]
    grey = (128, 128, 128)
    assert red[0] == [(11, 0, 0), (12, 0, 0), (21, 0, 0), (22, 0, 0)]
    assert red[1] == [(13, 0, 0), (14, 0, 0), grey, grey] and red[2] == [grey] * 4


def test_a_preview_shows_every_cell_of_a_canvas_and_four_images_at_most() -> None:
    painter: Any = Painter()
    progress = window([[5, 99, 99, 7, 99, 99]] * 6, [2] * 6)
    progress.is_committed = torch.tensor([[True, False, False, True, False, False]] * 6)
    shown = draw_progress(painter, progress, "abcdef", range(6))
    assert painter.asked[0][0] == [[5, 5, 5, 7, 5, 7]] * 4 and shown.size == (16, 6)
    lined: Any = Painter(rows=2, width=2, row_end=50)
    draw_progress(lined, window([[1, 2, 50, 3, 0, 0]], [4]), "a", [0])
    assert lined.asked[0][0] == [[1, 2, 50, 1, 2, 50]]  # structural columns stay
    for other, n_tokens in ((Painter(), 1), (Painter(rows=1, width=6), 6)):  # no whole row, no grid
        state = window([[1] * n_tokens], [n_tokens])
        assert draw_progress(other, state, "a", [0]) is None  # type: ignore[arg-type]
