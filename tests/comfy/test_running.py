"""Nodes at work: the command line's pixels, interrupts, previews that change nothing."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmaccel.cli import main
from mmaccel.comfy.hosts import V1Host
from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.open_model import OpenModel, file_state
from mmaccel.comfy.policies import NamedPolicy
from mmaccel.comfy.request import read_captions, to_tensor
from mmaccel.comfy.table import Made
from mmaccel.comfy.v1 import v1_class
from mmaccel.comfy.v3 import v3_class
from mmaccel.comfy.values import refusal, run_node
from mmaccel.comfy.watch import Watch
from mmaccel.errors import OptionError
from mmaccel.pipelines.text_to_image.outputs import Request, RequestOutput
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.results import Progress
from tests.comfy.fake_comfy import FakeComfy, Interrupted, install
from tests.fixtures.tiny_model import CAPTIONS, N_TOKENS, build_tiny, masked_beside_plain


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> FakeComfy:
    return install(monkeypatch, with_v3=False)


class Host:
    """Counts; `stop_at` is the check that raises."""

    def __init__(self, stop_at: int = 0) -> None:
        self.stop_at, self.checks = stop_at, 0
        self.reports: list[tuple[int, int, Any]] = []
        self.room: list[tuple[int, str]] = []

    def check_interrupt(self) -> None:
        self.checks += 1
        if self.checks == self.stop_at:
            raise Interrupted

    def report(self, done: int, total: int, image: Any) -> None:
        self.reports.append((done, total, image))

    def device(self) -> str:
        return "cpu"

    def make_room(self, size: int, device: str) -> None:
        self.room.append((size, device))

    def video(self, frames: torch.Tensor, fps: float) -> tuple[torch.Tensor, float]:
        return frames, fps


def run(name: str, host: Host | None = None, **values: Any) -> Made:
    return run_node(NODES[f"MMAccel{name}"], host or Host(), values)


@pytest.fixture
def model(tiny_folder: Path) -> OpenModel:
    return run("LoadModel", model=str(tiny_folder)).values[0]


def policy(name: str, **values: Any) -> NamedPolicy:
    return run(f"{name}Policy", **values).values[0]


def count_passes(monkeypatch: pytest.MonkeyPatch, model: OpenModel) -> list[int]:
    """Widths of the passes that were begun, prompts left out."""
    begun: list[int] = []
    window: Any = model.pipe.model
    forward = window.forward

    def counted(tokens: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        begun.append(tokens.shape[1])
        return forward(tokens, start)

    monkeypatch.setattr(window, "forward", counted)
    return begun


@pytest.mark.parametrize(
    ("node", "flags"),
    [
        ("Jacobi", ["--policy", "jacobi", "--window", "5"]),
        ("McSjd", ["--policy", "mc-sjd", "--window", "5"]),
    ],
)
def test_pixels_are_the_command_lines(
    node: str, flags: list[str], model: OpenModel, tmp_path: Path
) -> None:
    arguments = ["generate", *CAPTIONS[:2], "--count", "3", "--seed", "7", "--temperature", "0.9"]
    arguments += [*flags, "--model", model.name, "--out", str(tmp_path)]
    assert main(arguments) == 0
    files = sorted(file for file in tmp_path.glob("0*.png"))
    made = run(
        "GenerateImage", model=model, policy=policy(node, window=5),
        prompt="\n\n".join(CAPTIONS[:2]) + "\n", seed=7, count=3, temperature=0.9,
    )  # fmt: skip
    images, record = made.values
    assert images.shape[0] == len(files) == 3 and images.dtype == torch.float32
    for image, file in zip(images, files):
        with Image.open(file) as opened:
            written = list(opened.get_flattened_data())
        # as ComfyUI's SaveImage turns it into bytes
        shown = (255.0 * image).clamp(0, 255).to(torch.uint8).reshape(-1, 3).tolist()
        assert [tuple(pixel) for pixel in shown] == written
    assert [int(file.name[:4]) for file in files] == record.request.seeds == [7, 8, 9]
    assert record.request.captions == [CAPTIONS[0], CAPTIONS[1], CAPTIONS[0]]


def test_every_byte_survives_the_way_through_a_tensor() -> None:
    ramp = Image.new("RGB", (256, 1))
    ramp.putdata([(k, 255 - k, k // 2) for k in range(256)])
    tensor = to_tensor([ramp])
    assert tensor.shape == (1, 1, 256, 3) and 0 <= float(tensor.min()) and float(tensor.max()) == 1
    assert (255.0 * tensor).to(torch.uint8)[0, 0, :, 0].tolist() == list(range(256))


@pytest.mark.parametrize("stop_at", [1, 2, 5])
@pytest.mark.parametrize("name", ["Autoregressive", "Jacobi"])
def test_no_pass_is_begun_once_the_interrupt_was_seen(
    name: str, stop_at: int, model: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look is before the first pass, each further one follows a pass."""
    begun, host = count_passes(monkeypatch, model), Host(stop_at)
    fields = {"window": 2} if name == "Jacobi" else {}
    with pytest.raises(Interrupted):
        run(
            "GenerateImage", host, model=model, policy=policy(name, **fields), prompt=CAPTIONS[0],
            count=2,
        )  # fmt: skip
    assert len(begun) == stop_at - 1 and host.checks == stop_at
    made = run("GenerateImage", model=model, prompt=CAPTIONS[0])  # the model is free again
    assert made.values[0].shape[0] == 1


def test_an_interrupt_between_two_batches_ends_the_run(
    model: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = count_passes(monkeypatch, model)
    made = run("GenerateImage", model=model, policy=policy("Autoregressive"), prompt=CAPTIONS[0])
    assert made.values[1].passes == (N_TOKENS,) and len(begun) == N_TOKENS
    begun.clear()
    host = Host(stop_at=1 + N_TOKENS + 1)  # once before the first, after each pass, then this
    with pytest.raises(Interrupted):
        run(
            "GenerateImage", host, model=model, policy=policy("Autoregressive"),
            prompt=CAPTIONS[0], count=2,
        )  # fmt: skip
    assert len(begun) == N_TOKENS


@pytest.mark.parametrize("stop_at", [1, 4, 8])
def test_a_comparison_hears_the_interrupt_while_it_warms_up_and_later(
    stop_at: int, model: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two times three passes of warming up, one look after each; then a look before the run."""
    begun, host = count_passes(monkeypatch, model), Host(stop_at)
    with pytest.raises(Interrupted):
        run("Compare", host, model=model, policy=policy("Jacobi", window=2), prompt=CAPTIONS[0])
    assert len(begun) == {1: 1, 4: 4, 8: 7}[stop_at]


def test_previews_change_nothing(model: OpenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict(model=model, policy=policy("Jacobi", window=2), prompt=CAPTIONS[1], count=2)
    asked |= {"batch_size": 2}
    plain = run("GenerateImage", **asked)
    ticks = iter(range(10**6))  # a clock that jumps a second at every look: a preview every pass
    monkeypatch.setattr("mmaccel.comfy.generate.Watch", make_watch(lambda: float(next(ticks))))
    host = Host()
    shown = run("GenerateImage", host, **asked)
    assert torch.equal(shown.values[0], plain.values[0])
    assert shown.values[1].passes == plain.values[1].passes
    previews = [image for _, _, image in host.reports if image is not None]
    assert len(previews) > 3 and {p.size for p in previews} <= {(16, 16), (32, 16)}
    grey = (128, 128, 128)
    assert grey in [colour for _, colour in previews[0].getcolors(10**4)]
    # what stays on the page is finished: both images, side by side
    last = host.reports[-1][2]
    pixels = np.asarray(last).reshape(16, 2, 16, 3).transpose(1, 0, 2, 3) / np.float32(255)
    assert np.array_equal(pixels, shown.values[0].numpy())


def test_a_preview_that_finds_no_room_costs_the_preview_alone(
    model: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def full(*values: Any) -> Any:
        asked.append(values)
        raise torch.OutOfMemoryError("no room")

    ticks = iter(range(10**6))
    monkeypatch.setattr("mmaccel.comfy.generate.Watch", make_watch(lambda: float(next(ticks))))
    monkeypatch.setattr("mmaccel.comfy.watch.draw_progress", full)
    host = Host()
    made = run("GenerateImage", host, model=model, policy=policy("Autoregressive"),
               prompt=CAPTIONS[0])  # fmt: skip
    assert len(asked) == 1 and made.values[0].shape[0] == 1
    assert [image for _, _, image in host.reports if image is not None] == []


def make_watch(clock: Any) -> Any:
    return lambda host, images, total: Watch(host, images, total, clock)


def test_progress_counts_tokens_and_ends_full(
    model: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr("mmaccel.comfy.generate.Watch", make_watch(lambda: float(next(ticks))))
    host = Host()
    run("GenerateImage", host, model=model, policy=policy("Autoregressive"), prompt=CAPTIONS[0],
        count=3, batch_size=2)  # fmt: skip
    done = [value for value, _, _ in host.reports]
    assert {total for _, total, _ in host.reports} == {3 * N_TOKENS}
    steps = [2 * k for k in range(1, N_TOKENS + 1)]  # two rows, then the third in their place
    steps += [2 * N_TOKENS + k for k in range(1, N_TOKENS + 1)] + [3 * N_TOKENS]
    assert done == steps


def test_a_preview_knows_who_stands_in_which_place(
    model: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models draw with the caption and the seed."""
    asked: list[Any] = []
    monkeypatch.setattr("mmaccel.comfy.watch.draw_progress", lambda *v: asked.append(v[2:]))
    now = [0.0]
    watch = Watch(Host(), model.pipe.image_model, 64, lambda: now[0])
    requests = [Request(f"caption {k}", 10 + k, tag=k) for k in range(4)]
    watch.begin(requests)
    tokens, two = torch.zeros(2, N_TOKENS, dtype=torch.int64), torch.tensor([5, 7])
    now[0] = 1.0
    watch(Progress(tokens, two, two, 1, rows=(2, 1)))
    done = [RequestOutput(request, Image.new("RGB", (1, 1)), tokens[0], 3) for request in requests]
    watch.finish(done[1])
    now[0] = 2.0
    watch(Progress(tokens, two, two, 2, rows=(2, 1)))
    watch.finish(done[0])
    now[0] = 3.0
    watch(SimpleNamespace(lengths=two, rows=(2, 3)))  # a canvas
    assert asked == [
        (["caption 2", "caption 1"], [12, 11]), (["caption 2", "caption 1"], [12, 11]),
        (["caption 2", "caption 3"], [12, 13]),
    ]  # fmt: skip
    done_so_far = [value for value, _, _ in watch.host.reports]
    assert done_so_far == [5 + 7, N_TOKENS + 5, 2 * N_TOKENS + 5 + 7]


def test_an_interrupt_is_heard_between_two_images_of_a_batch(
    model: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turning tokens into pixels may take as long as many passes."""
    drawn: list[Any] = []
    render = model.pipe.image_model.render

    def count(*values: Any) -> Any:
        drawn.append(values)
        return render(*values)

    monkeypatch.setattr(type(model.pipe.image_model), "render", lambda self, *v: count(*v))
    host = Host(stop_at=1 + N_TOKENS + 1)  # before the first pass, after each, after an image
    with pytest.raises(Interrupted):
        run("GenerateImage", host, model=model, policy=policy("Autoregressive"),
            prompt=CAPTIONS[0], count=3, batch_size=3)  # fmt: skip
    assert len(drawn) == 1


def test_places_of_a_batch_change_nothing(model: OpenModel) -> None:
    asked = dict(
        model=model, policy=policy("Jacobi", window=3), prompt="\n".join(CAPTIONS), count=5
    )
    alone = run("GenerateImage", **asked, seed=4)
    passes = list(alone.values[1].passes)
    assert passes != sorted(passes)  # of five made together, a later one is finished earlier
    together = run("GenerateImage", **asked, seed=4, batch_size=5)
    assert torch.equal(alone.values[0], together.values[0])
    assert alone.values[1].passes == together.values[1].passes  # in the order of the captions
    assert together.values[1].stats.passes < alone.values[1].stats.passes


def test_a_negative_prompt_is_the_command_lines(model: OpenModel, tmp_path: Path) -> None:
    said = ["--guidance", "3", "--negative", CAPTIONS[2], "--seed", "5"]
    assert (
        main(["generate", CAPTIONS[0], *said, "--model", model.name, "--out", str(tmp_path)]) == 0
    )
    (file,) = tmp_path.glob("0*.png")
    asked = dict(model=model, prompt=CAPTIONS[0], seed=5, guidance_scale=3.0)
    images, record = run("GenerateImage", **asked, negative=f" {CAPTIONS[2]}\n").values
    with Image.open(file) as opened:
        written = np.asarray(opened)
    assert np.array_equal((images[0] * 255).round().to(torch.uint8).numpy(), written)
    assert not torch.equal(run("GenerateImage", **asked).values[0], images)
    assert f"negative     {CAPTIONS[2]}\n" in str(record)
    with pytest.raises(OptionError, match="negative prompt: expected a guidance_scale other than"):
        run("GenerateImage", **{**asked, "guidance_scale": 1.0}, negative=CAPTIONS[2])


def test_progress_is_told_ten_times_a_second_at_most(model: OpenModel) -> None:
    now, host = [0.0], Host()
    watch = Watch(host, model.pipe.image_model, N_TOKENS, lambda: now[0])
    watch.begin([Request(CAPTIONS[0], 0, tag=0)])
    tokens = torch.zeros(1, N_TOKENS, dtype=torch.int64)
    for k in range(100):  # one second in hundredths
        now[0] = k / 100
        lengths = torch.tensor([min(k // 6, N_TOKENS)])
        watch(Progress(tokens, lengths, lengths, k, rows=(0,)))
    assert 8 <= len(host.reports) <= 10
    assert host.checks == 102  # at the beginning, after each pass, and after the image
    assert sum(image is not None for _, _, image in host.reports) == 1


def test_a_model_is_loaded_once_and_let_go(tiny_folder: Path, tmp_path: Path) -> None:
    first = run("LoadModel", model=str(tiny_folder)).values[0]
    assert run("LoadModel", model=str(tiny_folder)).values[0] is first
    half = run("LoadModel", model=str(tiny_folder), dtype="bfloat16").values[0]
    assert half is not first and half.dtype == "bfloat16"
    from mmaccel.comfy import open_model

    before = len(open_model._kept)
    del first, half
    gc.collect()
    assert len(open_model._kept) < before


def test_a_model_nobody_holds_is_gone_before_the_next_is_loaded(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that do not fit in memory together: cycles must not keep the first one."""
    other, seen = build_tiny(tmp_path / "m"), []
    first = run("LoadModel", model=str(tiny_folder)).values[0]
    first.pipe.in_a_cycle = first.pipe
    kept, real = weakref.ref(first.pipe), TextToImage.from_pretrained

    def load(*values: Any, **options: Any) -> Any:
        seen.append(kept() is None)
        return real(*values, **options)

    monkeypatch.setattr(TextToImage, "from_pretrained", load)
    gc.disable()
    try:
        del first
        run("LoadModel", model=str(other))
    finally:
        gc.enable()
    assert seen == [True]


def test_the_host_is_asked_for_room_before_a_model_is_loaded(
    comfy: FakeComfy, tmp_path: Path
) -> None:
    """Other nodes' models may fill the memory; twice the files' bytes are asked for, once."""
    folder, host = build_tiny(tmp_path / "m"), Host()
    files = ("config.json", "tokenizer.json", "words.json", "generation_config.json",
             "model.safetensors", "tokenizer.safetensors")  # fmt: skip
    size = 2 * sum((folder / f).stat().st_size for f in files if (folder / f).exists())
    kept = run("LoadModel", host, model=str(folder)).values[0]
    assert run("LoadModel", host, model=str(folder)).values[0] is kept
    assert host.room == [(size, "cpu")] and host.checks == 1
    cls: Any = v1_class(NODES["MMAccelLoadModel"])
    cls().execute(model=str(folder), dtype="bfloat16")
    assert comfy.room == [(size, torch.device("cpu"))]
    V1Host().make_room(10, "cuda")  # which this ComfyUI does not compute on
    assert len(comfy.room) == 1


def test_an_interrupt_is_heard_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(TextToImage, "from_pretrained", lambda *a, **k: begun.append(a))
    with pytest.raises(Interrupted):
        run("LoadModel", Host(stop_at=1), model=str(build_tiny(tmp_path / "m")))
    assert begun == []


def test_a_path_may_be_pasted_as_file_managers_copy_it(tiny_folder: Path) -> None:
    named = run("LoadModel", model=str(tiny_folder)).values[0]
    assert run("LoadModel", model=f' "{tiny_folder}"\n').values[0] is named
    assert refusal(NODES["MMAccelLoadModel"], {"model": " scenes "}) is None
    assert "received ''" in str(refusal(NODES["MMAccelLoadModel"], {"model": '""'}))


def test_only_files_of_the_model_are_looked_at(tmp_path: Path) -> None:
    """A folder with everything in it, such as `/`, would keep the server busy for ever."""
    folder = build_tiny(tmp_path / "m")
    state = file_state(model=str(folder), decoder="")
    deep = folder / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "model.safetensors").write_bytes(b"x")
    (folder / "notes.txt").write_text("x", encoding="utf-8")
    assert file_state(model=str(folder), decoder="") == state
    masked, _ = masked_beside_plain(tmp_path / "two")
    before, (tokenizer,) = file_state(model=str(masked), decoder=""), [
        f for f in (tmp_path / "two").rglob("tokenizer.safetensors")
    ]  # fmt: skip
    assert tokenizer.parent != masked  # it lies beside the model, and belongs to it
    tokenizer.write_bytes(tokenizer.read_bytes())
    assert file_state(model=str(masked), decoder="") != before


def test_other_files_are_another_model(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "m")
    cls: Any = v1_class(NODES["MMAccelLoadModel"])
    state, kept = cls.IS_CHANGED(model=str(folder)), run("LoadModel", model=str(folder)).values[0]
    assert state == cls.IS_CHANGED(model=str(folder)) != ""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    assert cls.IS_CHANGED(model=str(folder)) != state
    assert run("LoadModel", model=str(folder)).values[0] is not kept
    assert file_state(model="owner/name", decoder="") == ""


def test_a_model_loaded_in_inference_mode_is_an_ordinary_one(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "m")
    with torch.inference_mode():
        opened = run("LoadModel", model=str(folder)).values[0]
        images = run("GenerateImage", model=opened, prompt=CAPTIONS[0]).values[0]
    assert not any(p.is_inference() for p in opened.pipe.model.model.parameters())
    assert not images.is_inference()


def test_a_model_that_is_not_there_explains_itself_in_the_node(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected a folder, a file, an id .* scenes.*received"):
        run("LoadModel", model=str(tmp_path / "nothing"))
    with pytest.raises(OptionError, match="received 'owner/name' .*; check the spelling"):
        run("LoadModel", model="owner/name")


def test_a_caption_or_policy_the_model_cannot_take_stops_before_any_pass(
    model: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = count_passes(monkeypatch, model)
    with pytest.raises(OptionError, match="words the model knows, received 'xylophone'"):
        run("GenerateImage", model=model, prompt="a red xylophone")
    with pytest.raises(OptionError, match="at least one word, received none"):
        run("GenerateImage", model=model, prompt=" \n ")
    with pytest.raises(OptionError, match="'stepwise', which decodes a canvas, not a window"):
        run("GenerateImage", model=model, policy=policy("Stepwise"), prompt=CAPTIONS[0])
    with pytest.raises(OptionError, match="another model than the one that is decoded"):
        own = policy("Speculative", draft_model=model)
        run("GenerateImage", model=model, policy=own, prompt=CAPTIONS[0])
    assert begun == []


def test_a_linked_value_is_judged_when_it_is_there(model: OpenModel) -> None:
    with pytest.raises(OptionError, match="window: expected an integer in 1..4096"):
        policy("Jacobi", window=5000)
    with pytest.raises(OptionError, match="batch_size: expected a number in 1..4096"):
        run("GenerateImage", model=model, prompt=CAPTIONS[0], batch_size=0)


def test_a_draft_model_is_used(model: OpenModel, tmp_path: Path) -> None:
    draft = run("LoadModel", model=str(build_tiny(tmp_path / "d"))).values[0]
    chosen = policy("Speculative", draft_model=draft, window=4)
    assert chosen.policy.draft_model is draft.pipe.model
    _, record = run("GenerateImage", model=model, policy=chosen, prompt=CAPTIONS[0]).values
    assert record.stats.draft_passes > 0 and record.stats.exactness == "distribution"


def test_masked_models_are_drawn_with_previews_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masked, _ = masked_beside_plain(tmp_path)
    model = run("LoadModel", model=str(masked)).values[0]
    plain = run("GenerateImage", model=model, prompt=CAPTIONS[0])
    assert plain.values[1].request.chosen.name == "lossless-unmask"
    ticks = iter(range(10**6))
    monkeypatch.setattr("mmaccel.comfy.generate.Watch", make_watch(lambda: float(next(ticks))))
    host = Host()
    shown = run("GenerateImage", host, model=model, prompt=CAPTIONS[0])
    assert torch.equal(shown.values[0], plain.values[0])
    assert any(image is not None for _, _, image in host.reports)


def test_stats_say_promise_tokens_passes_and_seeds(model: OpenModel) -> None:
    chosen = policy("Jacobi", window=5)
    _, record = run(
        "GenerateImage", model=model, policy=chosen, prompt="\n".join(CAPTIONS[:2]), seed=2**64 - 1
    ).values
    made = run("Stats", stats=record)
    assert made.values == (made.text,)
    text = made.text or ""
    assert "policy       jacobi, window 5\n" in text and "bitwise: same seed, same tokens" in text
    assert f"tokens       {2 * N_TOKENS} in " in text and f"{model.name} (float32 on cpu)" in text
    own = [f"seed {s}: {N_TOKENS} tokens in {p} forward passes: {caption}"
           for s, p, caption in zip((2**64 - 1, 0), record.passes, CAPTIONS)]  # fmt: skip
    assert text.endswith("\n".join(own))


def test_a_comparison_makes_both_sides_and_says_how_they_compare(
    model: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, begun = "\n".join(CAPTIONS), count_passes(monkeypatch, model)
    chosen = policy("Jacobi", window=5)
    sheet, plain, fast, record = run(
        "Compare", model=model, policy=chosen, prompt=prompt, seed=3
    ).values
    assert plain.shape == fast.shape == (3, 16, 16, 3) and torch.equal(plain, fast)
    assert len(begun) == 3 + 3 + 3 * N_TOKENS + record.stats.passes  # warm up, plain, policy
    oracle = run(
        "GenerateImage", model=model, policy=policy("Autoregressive"), prompt=prompt, seed=3
    ).values[0]
    assert torch.equal(plain, oracle)
    assert sheet.shape[0] == 1 and sheet.shape[2] > 2 * 240
    assert record.verdict == "The same images, token for token"
    assert f"compared     {record.verdict}\n" in str(record)
    assert record.stats.passes < 3 * N_TOKENS


def test_lines_are_captions() -> None:
    assert read_captions(" a b \r\n\n c\n") == ["a b", "c"]
    assert read_captions("") == read_captions(" \n\n") == [""]


def test_first_schema_runs_on_comfyui(comfy: FakeComfy, tiny_folder: Path) -> None:
    def call(name: str, **values: Any) -> Any:
        cls: Any = v1_class(NODES[f"MMAccel{name}"])
        return getattr(cls(), cls.FUNCTION)(**values)

    (model,) = call("LoadModel", model=str(tiny_folder), device="auto")
    images, record = call("GenerateImage", model=model, prompt=CAPTIONS[0], seed=1)
    assert images.shape == (1, 16, 16, 3)
    assert comfy.checks > 1 and comfy.reports[-1][:2] == (N_TOKENS, N_TOKENS)
    shown = call("Stats", stats=record)
    assert shown["ui"]["text"] == shown["result"] == (str(record),)
    comfy.stop_at = comfy.checks + 3
    with pytest.raises(Interrupted):
        call("GenerateImage", model=model, prompt=CAPTIONS[0], seed=2)


def test_third_schema_runs_on_comfyui(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    comfy = install(monkeypatch, with_v3=True)

    def call(name: str, **values: Any) -> Any:
        return v3_class(NODES[f"MMAccel{name}"]).execute(**values)

    (model,) = call("LoadModel", model=str(tiny_folder), device="auto").args
    images, record = call("GenerateImage", model=model, prompt=CAPTIONS[0], seed=1).args
    assert images.shape == (1, 16, 16, 3)
    assert comfy.checks > 1 and comfy.reports[-1] == (N_TOKENS, N_TOKENS, None)
    shown = call("Stats", stats=record)
    assert shown.ui == {"text": (str(record),)} and shown.args == (str(record),)
    comfy.stop_at = comfy.checks + 3
    with pytest.raises(Interrupted):
        call("GenerateImage", model=model, prompt=CAPTIONS[0], seed=2)
