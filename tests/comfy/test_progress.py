"""Progress and previews: they change nothing; expected values by hand."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel.comfy.loading import LoadedModel
from mmaccel.comfy.progress import ImageProgress, draw_progress, fill_unknown, known_cells
from mmaccel.pipelines.text_to_image.outputs import Request, RequestOutput
from mmaccel.results import Progress
from mmaccel.tokenizers_vq.grid import Grid
from tests.comfy.fake_comfy import Host, passes_of, policy, run
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS, masked_beside_plain

GREY = (128, 128, 128)


def requests(prompts: str, seed: int = 0) -> list[Request]:
    return [Request(prompt, seed + k) for k, prompt in enumerate(prompts)]


class Painter:
    """Draws token t as two by two pixels of red t, and records the calls."""

    def __init__(self, rows: int = 3, width: int = 2, **options: Any) -> None:
        self.layout = Grid(rows, width, 100, **options)
        self.asked: list[Any] = []

    def render(self, tokens: torch.Tensor, captions: Any, seeds: Any) -> list[Image.Image]:
        self.asked.append((tokens.tolist(), list(captions), list(seeds)))
        images = []
        for row in tokens.tolist():
            image = Image.new("RGB", (self.layout.columns, self.layout.rows))
            image.putdata([(t, 0, 0) for t in row])
            images.append(image.resize((2 * self.layout.columns, 2 * self.layout.rows)))
        return images


def window(tokens: list[list[int]], lengths: list[int]) -> Any:
    return SimpleNamespace(tokens=torch.tensor(tokens), lengths=torch.tensor(lengths))


def test_of_a_window_only_whole_rows_are_known() -> None:
    known = known_cells(window([[0] * 6] * 3, [0, 3, 6]), 3, 2)
    assert known.tolist() == [
        [[False, False]] * 3,
        [[True, True], [False, False], [False, False]],
        [[True, True]] * 3,
    ]


def test_of_a_canvas_every_committed_cell_is_known() -> None:
    committed = torch.tensor([[True, False, False, False, True, False]])
    known = known_cells(SimpleNamespace(is_committed=committed), 3, 2)
    assert known.tolist() == [[[True, False], [False, False], [True, False]]]


def test_unknown_cells_repeat_the_nearest_above_or_the_first_known() -> None:
    tokens = torch.tensor([[[5, 99], [99, 7], [99, 99]]])
    known = torch.tensor([[[True, False], [False, True], [False, False]]])
    assert fill_unknown(tokens, known).tolist() == [[[5, 5], [5, 7], [5, 7]]]
    assert tokens.tolist() == [[[5, 99], [99, 7], [99, 99]]]


def test_a_preview_shows_what_is_there_and_grey_below() -> None:
    painter = Painter()
    progress = window([[11, 12, 13, 14, 88, 0], [0] * 6, [21, 22, 23, 0, 0, 0]], [5, 1, 3])
    shown = draw_progress(painter, progress, requests("abc", 7))
    assert shown is not None and shown.size == (8, 6)  # the second has no whole row yet
    assert painter.asked == [
        ([[11, 12, 13, 14, 13, 14], [21, 22, 21, 22, 21, 22]], ["a", "c"], [7, 9])
    ]
    at = [[shown.getpixel((x, y)) for x in (0, 2, 4, 6)] for y in (0, 2, 4)]
    assert at[0][0] == (11, 0, 0) and at[0][2] == (21, 0, 0)
    assert at[1][:2] == [(13, 0, 0), (14, 0, 0)] and at[1][2:] == [GREY, GREY]
    assert at[2] == [GREY] * 4


def test_four_images_at_most() -> None:
    painter = Painter()
    progress = window([[k] * 6 for k in range(6)], [6] * 6)
    shown = draw_progress(painter, progress, requests("abcdef"))
    assert shown is not None and shown.size == (16, 6)


def test_nothing_is_drawn_where_there_is_nothing_to_see() -> None:
    progress = window([[1] * 6], [1])
    assert draw_progress(Painter(), progress, requests("a")) is None  # no whole row
    one_line = Painter(rows=1, width=6)
    assert draw_progress(one_line, window([[1] * 6], [6]), requests("a")) is None
    ended = Painter(rows=3, width=2, image_end=9)
    assert draw_progress(ended, window([[1] * 7], [7]), requests("a")) is None
    assert one_line.asked == ended.asked == []


def test_structural_columns_stay_where_they_are() -> None:
    painter = Painter(rows=2, width=2, row_end=50)
    draw_progress(painter, window([[1, 2, 50, 3, 0, 0]], [4]), requests("a"))
    assert painter.asked[0][0] == [[1, 2, 50, 1, 2, 50]]


def test_previews_change_nothing(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict(model=model, policy=policy("Jacobi", window=2), prompt=CAPTIONS[1], num_images=2)
    asked |= {"batch_size": 2}
    plain = run("GenerateImage", **asked)
    preview_every_pass(monkeypatch)
    host = Host()
    shown = run("GenerateImage", host, **asked)
    assert torch.equal(shown.values[0], plain.values[0])
    assert passes_of(shown.values[1]) == passes_of(plain.values[1])
    previews = [image for _, _, image in host.reports if image is not None]
    assert len(previews) > 3 and {p.size for p in previews} <= {(16, 16), (32, 16)}
    grey = (128, 128, 128)
    assert grey in [colour for _, colour in previews[0].getcolors(10**4)]
    # what stays on the page is finished: both images, side by side
    last = host.reports[-1][2]
    pixels = np.asarray(last).reshape(16, 2, 16, 3).transpose(1, 0, 2, 3) / np.float32(255)
    assert np.array_equal(pixels, shown.values[0].numpy())


def test_a_preview_without_enough_memory_is_left_out(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def full(*values: Any) -> Any:
        asked.append(values)
        raise torch.OutOfMemoryError("full")

    preview_every_pass(monkeypatch)
    monkeypatch.setattr("mmaccel.comfy.progress.draw_progress", full)
    host = Host()
    made = run(
        "GenerateImage", host, model=model, policy=policy("Autoregressive"), prompt=CAPTIONS[0]
    )
    assert len(asked) == 1 and made.values[0].shape[0] == 1
    assert [image for _, _, image in host.reports if image is not None] == []


def preview_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that is a second later at every call."""
    clock = map(float, itertools.count())
    made = partial(ImageProgress, clock=lambda: next(clock))
    monkeypatch.setattr("mmaccel.comfy.images.ImageProgress", made)


def test_progress_counts_tokens_and_ends_full(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    preview_every_pass(monkeypatch)
    host = Host()
    run(
        "GenerateImage",
        host,
        model=model,
        policy=policy("Autoregressive"),
        prompt=CAPTIONS[0],
        num_images=3,
        batch_size=2,
    )
    done = [value for value, _, _ in host.reports]
    assert {total for _, total, _ in host.reports} == {3 * N_TOKENS}
    steps = [2 * k for k in range(1, N_TOKENS + 1)]  # two rows, then the third
    steps += [2 * N_TOKENS + k for k in range(1, N_TOKENS + 1)] + [3 * N_TOKENS]
    assert done == steps


def test_a_preview_gets_the_request_of_each_row(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models render with the prompt and the seed."""
    asked: list[Any] = []
    monkeypatch.setattr(
        "mmaccel.comfy.progress.draw_progress",
        lambda *v: asked.append([(r.prompt, r.seed) for r in v[2]]),
    )
    now = [0.0]
    progress = ImageProgress(Host(), model.pipe.image_model, 64, lambda: now[0])
    requests = [Request(f"caption {k}", 10 + k, tag=k) for k in range(4)]
    progress.begin(requests)
    tokens, two = torch.zeros(2, N_TOKENS, dtype=torch.int64), torch.tensor([5, 7])
    now[0] = 1.0
    progress(Progress(tokens, two, two, 1, rows=(2, 1)))
    done = [RequestOutput(request, Image.new("RGB", (1, 1)), tokens[0], 3) for request in requests]
    progress.finish(done[1])
    now[0] = 2.0
    progress(Progress(tokens, two, two, 2, rows=(2, 1)))
    progress.finish(done[0])
    now[0] = 3.0
    progress(SimpleNamespace(lengths=two, rows=(2, 3)))  # a canvas
    assert asked == [
        [("caption 2", 12), ("caption 1", 11)],
        [("caption 2", 12), ("caption 1", 11)],
        [("caption 2", 12), ("caption 3", 13)],
    ]
    done_so_far = [value for value, _, _ in progress.host.reports]
    assert done_so_far == [5 + 7, N_TOKENS + 5, 2 * N_TOKENS + 5 + 7]


def test_progress_is_reported_ten_times_a_second_at_most(model: LoadedModel) -> None:
    now, host = [0.0], Host()
    progress = ImageProgress(host, model.pipe.image_model, N_TOKENS, lambda: now[0])
    progress.begin([Request(CAPTIONS[0], 0, tag=0)])
    tokens = torch.zeros(1, N_TOKENS, dtype=torch.int64)
    for k in range(100):  # one second in hundredths
        now[0] = k / 100
        lengths = torch.tensor([min(k // 6, N_TOKENS)])
        progress(Progress(tokens, lengths, lengths, k, rows=(0,)))
    assert 8 <= len(host.reports) <= 10
    assert host.checks == 102  # at the beginning, after each pass, and after the image
    assert sum(image is not None for _, _, image in host.reports) == 1


def test_masked_models_are_drawn_with_previews_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked, _ = masked_beside_plain(tmp_path)
    model = run("LoadModel", model=str(masked)).values[0]
    plain = run("GenerateImage", model=model, prompt=CAPTIONS[0])
    assert plain.values[1].chosen.name == "lossless-unmask"
    preview_every_pass(monkeypatch)
    host = Host()
    shown = run("GenerateImage", host, model=model, prompt=CAPTIONS[0])
    assert torch.equal(shown.values[0], plain.values[0])
    assert any(image is not None for _, _, image in host.reports)
