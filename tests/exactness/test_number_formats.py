"""`stats.exactness` follows the arithmetic that the passes of a run were computed in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

import mmaccel
from mmaccel.results import Stats, add_stats, exactness_in
from tests.fixtures.denoiser_targets import LENGTH, PADDED, TARGETS
from tests.fixtures.lanes import every
from tests.fixtures.media import build_media, open_media
from tests.fixtures.tiny_lms import PROMPTS, build_lm
from tests.fixtures.tiny_model import CAPTIONS, masked_beside_plain

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
ROUNDED = ("up to rounding", "bfloat16")


@contextmanager
def _products(setting: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


FORMATS: dict[str, tuple[Any, torch.dtype, tuple[str, str]]] = {
    "float32": (nullcontext, torch.float32, ("bitwise", "float32")),
    "float64": (nullcontext, torch.float64, ("bitwise", "float64")),
    "bfloat16": (nullcontext, torch.bfloat16, ROUNDED),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), torch.float32, ROUNDED),
    "autocast off": (lambda: torch.autocast("cpu", enabled=False), torch.float32,
                     ("bitwise", "float32")),
    "products": (lambda: _products("medium"), torch.float32, ("up to rounding", "bf16")),
}  # fmt: skip


def _badge(stats: Stats) -> tuple[str, str]:
    return stats.exactness, stats.dtype


@pytest.mark.parametrize("name", FORMATS)
def test_attached_generate(name: str) -> None:
    inside, dtype, expected = FORMATS[name]
    model = build_lm("llama")
    with mmaccel.attach(model, mmaccel.Jacobi(window=4)) as run:
        model.to(dtype)  # after `attach`, as a user may
        with inside():
            model.generate(**PROMPTS, **GREEDY)
    assert run.stats.fallbacks == [] and _badge(run.stats) == expected
    assert (expected[0] == "bitwise") == ("up to rounding" not in str(run.stats))


@pytest.mark.parametrize("name", ["sdar", "masked-lm"])
@pytest.mark.parametrize("policy", ["lossless-unmask", "stepwise"])
def test_attached_denoisers(name: str, policy: str) -> None:
    target = TARGETS[name]()
    model, made = getattr(target, "model", target), {}
    with mmaccel.attach(target, policy, seed=7) as run:
        for kind in ("float32", "autocast", "bfloat16"):
            inside, dtype, expected = FORMATS[kind]
            model.to(dtype)
            with inside():
                target.generate(**PADDED, max_new_tokens=LENGTH)
            made[kind] = _badge(run.stats) == expected
    assert all(made.values()), made


def test_images_under_autocast_and_in_half_precision(tmp_path: Path) -> None:
    for folder in masked_beside_plain(tmp_path):
        for kind in ("float32", "autocast", "bfloat16"):
            inside, dtype, expected = FORMATS[kind]
            pipe = mmaccel.TextToImage.from_pretrained(folder, dtype=dtype)
            with inside():
                made = pipe(CAPTIONS[0])
            assert _badge(made.stats) == expected, (folder.name, kind)


@pytest.mark.parametrize("kind", ["orpheus", "cosmos"])
def test_speech_and_video_under_autocast(kind: str, tmp_path: Path) -> None:
    from tests.fixtures.media import MediaCase

    folders = build_media(kind, tmp_path)
    case = MediaCase(kind, folders, open_media(kind, folders))
    assert _badge(case.call().stats) == ("bitwise", "float32")
    with torch.autocast("cpu", torch.bfloat16):
        assert _badge(case.call().stats) == ROUNDED


def _cast_inside(model: Any) -> None:
    """Autocast within the forward, and float32 logits: what no code around the pass can see."""
    own = type(model).forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = own(self, *args, **options)
        if isinstance(out, tuple):
            return tuple(part.float() for part in out)
        out.logits = out.logits.float()
        return out

    model.forward = forward.__get__(model)


def _prepare(model: Any) -> None:
    """What a training script does to its model."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)  # of another test in this process
    accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)


def _short_mlps(model: Any) -> None:
    """MLPs in bfloat16, between casts."""
    for mlp in _mlps(model):
        own = mlp.bfloat16().forward
        mlp.forward = lambda x, own=own: own(x.bfloat16()).to(x.dtype)


def _short_products(model: Any) -> None:
    """As a Linear of one's own may compute over float32 weights."""
    for part in model.modules():
        if isinstance(part, torch.nn.Linear):
            part.forward = lambda x, part=part: (
                functional.linear(x.bfloat16(), part.weight.bfloat16()).float()
                + (0 if part.bias is None else part.bias)
            )


def _mlps(model: Any) -> list[Any]:
    return [part for name, part in model.named_modules() if re.search(r"\bmlps?(\.\d+)?$", name)]


CASTS = [_cast_inside, _prepare, _short_mlps, _short_products]


@pytest.mark.parametrize(
    ("cast", "name"), every(2, zip(CASTS, ("llama", "gemma3", "gpt2", "gemma3")))
)
def test_autocast_inside_a_models_forward(name: str, cast: Any) -> None:
    """Switched on after the model passed its self-check, and off again."""
    model = build_lm(name)
    with mmaccel.attach(model, mmaccel.Jacobi(window=4)) as run:
        model.generate(**PROMPTS, **GREEDY)
        cast(model)
        for prompt in (PROMPTS, {"input_ids": torch.tensor([[5]])}):  # no pass over a prompt
            model.generate(**prompt, **GREEDY)
        for part in model.float().modules():
            vars(part).pop("forward", None)
        model.generate(**PROMPTS, **GREEDY)
    assert not any(stats.fallbacks for stats in run.history)
    plain = ("bitwise", "float32")
    assert [_badge(stats) for stats in run.history] == [plain, ROUNDED, ROUNDED, plain]


@pytest.mark.parametrize("cast", every(2, CASTS))
def test_autocast_inside_a_denoisers_forward(cast: Any) -> None:
    target = TARGETS["sdar" if cast is _prepare else "masked-lm"]()
    cast(getattr(target, "model", target).float())  # autocast leaves float64 alone
    with mmaccel.attach(target, "stepwise", seed=7) as run:
        target.generate(**PADDED, max_new_tokens=LENGTH)
    assert _badge(run.stats) == ROUNDED


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_higher_order_operator_inside_a_forward() -> None:
    model = build_lm("llama")
    for mlp in _mlps(model):
        mlp.forward = lambda x, own=mlp.forward: own(_attend(x.bfloat16()).float())
    plain = model.generate(**PROMPTS, **GREEDY)
    with mmaccel.attach(model, mmaccel.Jacobi(window=4)) as run:
        assert model.generate(**PROMPTS, **GREEDY).equal(plain)
    assert not run.stats.fallbacks and _badge(run.stats) == ROUNDED


def _attend(x: torch.Tensor) -> torch.Tensor:
    """Of every state to itself."""
    found: torch.Tensor = flex_attention(x[..., None, :], x[..., None, :], x[..., None, :])
    return found[..., 0, :]


def test_other_words_stay_and_the_weakest_counts() -> None:
    words = ("bitwise", "up to rounding", "distribution", "relaxed")
    assert [exactness_in(word, "bfloat16") for word in words] == ["up to rounding", *words[1:]]
    assert [exactness_in(word, "float32") for word in words] == list(words)
    parts = [Stats("P", exactness=word) for word in words]  # type: ignore[arg-type]
    for n in range(1, len(words) + 1):
        assert add_stats(parts[:n]).exactness == words[n - 1]


WINDOWS = (
    mmaccel.Jacobi(window=6, drafts="online"),
    mmaccel.Jacobi(window=6, drafts="token-recycling", tree=mmaccel.DySpec(6, depth=3)),
    mmaccel.SpeculativeJacobi(window=6),
)
CANVASES = ("lossless-unmask", "entropy-bounded")
STOPPED = "stopped by its caller"


def _stop(_: object) -> None:
    raise RuntimeError(STOPPED)


def _decode(model: Any, folder: Path, inside: Any = nullcontext) -> dict[str, list[int]]:
    """Tokens of fresh objects, each after it was opened, used and interrupted `inside`."""
    made = {}
    for name in ("plain", "masked", "scenes"):
        with inside():
            pipe = mmaccel.TextToImage.from_pretrained(name if name == "scenes" else folder / name)
        coarse = mmaccel.Jacobi(window=8, drafts="coarse")
        for policy in {"plain": WINDOWS, "masked": CANVASES, "scenes": (coarse,)}[name]:
            prompt = "a red circle" if name == "scenes" else CAPTIONS[0]
            with inside():
                pipe(prompt, seed=3, policy=policy)
                with pytest.raises(RuntimeError, match=STOPPED):
                    pipe(prompt, seed=3, policy=policy, on_step=_stop)
            made[f"{name} {policy}"] = pipe(prompt, seed=3, policy=policy).tokens.tolist()
    for policy in WINDOWS:
        with mmaccel.attach(model, policy, seed=3) as run:
            for here in (inside, nullcontext):
                with here():
                    tokens = model.generate(**PROMPTS, max_new_tokens=8, do_sample=True)
            made[f"llama {policy}"] = tokens.tolist()
            assert run.stats.fallbacks == [] and _badge(run.stats)[1] == "float32"
    return made


@pytest.mark.slow
def test_calls_under_autocast_leave_nothing_behind(tmp_path: Path) -> None:
    masked_beside_plain(tmp_path)
    expected = _decode(build_lm("llama"), tmp_path)
    short = _decode(build_lm("llama"), tmp_path, lambda: torch.autocast("cpu", torch.bfloat16))
    assert short == expected
