"""Which backend runs a kernel, and the message where it cannot."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmaccel.errors import MissingBackendError, OptionError
from mmaccel.kernels import (
    coarse_rounds,
    coarse_rounds_numpy,
    dispatch,
    gpu_obstacle,
    sample,
    sample_numpy,
)
from mmaccel.kernels.device_errors import is_device_error
from mmaccel.kernels.noise import uniforms
from mmaccel.kernels.takes import Takes
from mmaccel.samplers.drafting.contract import Drafter
from mmaccel.samplers.drafting.copies import Left
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.samplers.window.seeded_sampling import FusedDraws, StepwiseDraws, choose_draws

ROWS = torch.arange(2)
CALL = (ROWS, ROWS, ROWS[:, None], 5, torch.tensor(0))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    caches = (dispatch.find_obstacle, dispatch._names, dispatch._triton_module)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def pretend(
    monkeypatch: pytest.MonkeyPatch, version: str = "3.7.1", takes: Takes | None = None
) -> list[str]:
    """A triton of that version, and a kernel that records its calls."""
    called: list[str] = []

    def kernel(*args: object) -> str:
        called.append("kernel")
        return "made by Triton"

    fake = SimpleNamespace(uniforms=kernel, TAKES={} if takes is None else {"seeds": takes})
    modules = {
        "triton": SimpleNamespace(__version__=version),
        "mmaccel.kernels.noise_triton": fake,
    }
    monkeypatch.setattr(dispatch, "import_module", lambda name: modules[name])
    return called


def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_device_type", lambda *_: "cuda")


def test_another_mode_is_refused_by_every_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "cuda")
    entries = [
        dispatch.mode,
        lambda: dispatch.run(uniforms, *CALL),
        lambda: dispatch.decide(uniforms, *CALL),
        lambda: dispatch.uses_triton("cpu"),
        lambda: dispatch.check("cpu"),
        lambda: dispatch.choose("cpu"),
    ]
    for entry in entries:
        with pytest.raises(OptionError):
            entry()


@pytest.mark.parametrize(
    ("mode", "gpu", "backend", "reason"),
    [
        ("auto", False, "torch", "the tensors are on cpu"),
        ("", True, "triton", "the tensors are on cuda"),
        ("torch", True, "torch", "MMACCEL_KERNELS=torch"),
    ],
)
def test_modes(
    mode: str, gpu: bool, backend: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = pretend(monkeypatch)
    monkeypatch.setenv(dispatch.VARIABLE, mode)
    device = "cuda" if gpu else "cpu"
    if gpu:
        on_gpu(monkeypatch)
    choice = dispatch.decide(uniforms, *CALL)
    assert choice.backend == backend and reason in choice.reason
    assert dispatch.uses_triton(device) == (backend == "triton")
    made = dispatch.run(uniforms, *CALL)
    assert bool(called) == isinstance(made, str) == (backend == "triton")


@pytest.mark.parametrize(
    ("version", "takes", "gpu", "reason"),
    [
        ("3.7.1", None, False, "the tensors are on cpu"),
        ("3.5.1", None, True, "triton 3.5.1 is older than 3.6; pip install 'triton>=3.6'"),
        ("3.7.1", Takes(axes=2), True, "the kernel takes 2 axes"),
    ],
)
def test_what_is_in_the_way(
    version: str, takes: Takes | None, gpu: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` falls back and says why; `triton` raises rather than fall back unseen."""
    called = pretend(monkeypatch, version, takes)
    if gpu:
        on_gpu(monkeypatch)
    choice = dispatch.decide(uniforms, *CALL)
    assert choice.backend == "torch" and reason in choice.reason
    assert dispatch.run(uniforms, *CALL).equal(uniforms(*CALL))
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    with pytest.raises(MissingBackendError):
        dispatch.run(uniforms, *CALL)
    assert not called and dispatch.uses_triton("cpu")


def test_the_interpreter_gets_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it computes of bfloat16 is wrong, and it does not say so."""
    pretend(monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.decide(uniforms, *CALL) == ("triton", "interpreted")
    choice = dispatch.decide(uniforms, *CALL[:-1], torch.tensor(0.0, dtype=torch.bfloat16))
    assert choice.backend == "torch" and "bfloat16" in choice.reason


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, wherever its pointers lie."""
    entered: list[torch.device] = []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None:
            entered.append(torch.device("cpu"))

    pretend(monkeypatch)
    on_gpu(monkeypatch)
    there = torch.device("cuda", 1)
    distant = SimpleNamespace(device=there, dtype=torch.int64)
    monkeypatch.setattr(dispatch, "_tensors", lambda *_: [distant])
    monkeypatch.setattr(torch.cuda, "device", Guard)
    assert dispatch.run(uniforms, *CALL) == "made by Triton"
    assert entered == [there, torch.device("cpu")]


@pytest.mark.parametrize("trouble", ["", "old", "no compiler", "lost"])
def test_what_keeps_triton_from_a_gpu_that_is_there(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> object:
        if trouble == "no compiler":
            raise RuntimeError("Failed to find C compiler.")
        if trouble == "lost":
            raise RuntimeError("CUDA error: an illegal memory access")
        return object()

    ages = [(9, 0), (7, 5) if trouble == "old" else (8, 0)]
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=start))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ages[index])
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(gpu_obstacle, "import_module", lambda _: SimpleNamespace(driver=driver))
    pretend(monkeypatch)
    if trouble == "lost":
        with pytest.raises(RuntimeError, match="illegal"):
            dispatch.find_obstacle("cuda")
        return
    reason = dispatch.find_obstacle("cuda")
    said = {"old": "compute capability 7.5", "no compiler": "Failed to find C compiler"}
    assert reason is None if not trouble else said[trouble] in str(reason)


def test_errors_of_the_device_are_told_from_others() -> None:
    for said in ("CUDA error: x", "Triton Error [CUDA]: x", "HIP error: x", "device-side assert"):
        assert is_device_error(RuntimeError(said))
    others = (ValueError("CUDA error"), torch.OutOfMemoryError("CUDA error: no memory"))
    assert not any(map(is_device_error, (*others, RuntimeError("a mask of another size"))))


def test_check_refuses_early(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    dispatch.check("cpu")
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    dispatch.check("cuda")
    with pytest.raises(MissingBackendError):
        dispatch.check("cpu")


def test_without_triton_nothing_but_its_kernels_is_missing() -> None:
    """A process that cannot import triton: the package works, `triton` says what is missing."""
    code = (
        "import sys, os; sys.modules['triton'] = None\n"
        "import torch\n"
        "from mmaccel.kernels import dispatch\n"
        "from mmaccel.kernels.noise import uniforms\n"
        "r = torch.arange(2); call = (r, r, r[:, None], 5, torch.tensor(0))\n"
        "print(dispatch.run(uniforms, *call).shape, dispatch.decide(uniforms, *call).reason)\n"
        "os.environ['MMACCEL_KERNELS'] = 'triton'\n"
        "try:\n    dispatch.run(uniforms, *call)\n"
        "except ImportError as error:\n    print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[2, 1, 5]" in done.stdout and "triton does not import" in done.stdout
    assert done.stdout.endswith("MissingBackendError\n")


@pytest.mark.parametrize("mode", ["auto", "torch", "triton"])
@pytest.mark.parametrize(
    "options",
    [
        {"processor": lambda scores, tokens, columns: scores, "temperature": 0.0},
        {"top_h": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_the_sample_kernel_does_not_apply(
    options: dict[str, Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits processors and some rules need scores, which the kernel never writes: torch steps, or
    an error.
    """
    monkeypatch.setenv(dispatch.VARIABLE, mode)
    monkeypatch.setattr(dispatch, "find_obstacle", lambda device_type: None)
    params = SamplingParams(**options)
    noise = Noise.from_seed(0, 2)
    run: Any = SimpleNamespace(
        params=params,
        rows=SimpleNamespace(tokens=ROWS, slots=ROWS[:, None]),
        noise=noise,
        vocab_size=5,
        passes=SimpleNamespace(recording=None),
        drafter=Drafter(Left()),
        frozen_noise=lambda: noise.frozen(ROWS[:, None], 5, 0.0),
    )
    if mode == "triton":
        with pytest.raises(MissingBackendError):
            choose_draws(run)
    else:
        assert choose_draws(run) is StepwiseDraws
    run.params = SamplingParams(**options | {"processor": None, "temperature": 0.0})
    assert choose_draws(run) is (StepwiseDraws if mode == "torch" else FusedDraws)


@pytest.mark.parametrize(
    ("rows", "reads_back", "mode", "expected"),
    [
        (1, True, "auto", {"argmax", "coarse_rounds"}),
        (64, True, "auto", {"argmax", "coarse_rounds"}),
        (65, True, "auto", {"coarse_rounds"}),  # however many rows there are
        (1, False, "auto", set()),  # captured steps
        (1, True, "torch", set()),
    ],
)
def test_a_run_takes_numpy_where_its_few_rows_are_read_on_a_cpu(
    rows: int, reads_back: bool, mode: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, mode)
    taken: set[str] = set()
    specifications = {
        "argmax": sample.argmax,
        "coarse_rounds": coarse_rounds.coarse_rounds,
    }
    versions = (sample_numpy, coarse_rounds_numpy)
    for module, name in zip(versions, specifications, strict=True):
        monkeypatch.setattr(module, name, lambda *given, name=name: taken.add(name))
    backend = dispatch.Backend("cpu", rows, reads_back=reads_back)
    for specification in specifications.values():
        with suppress(TypeError, AttributeError):  # the real ones want other arguments
            backend.run(specification, None)
    assert taken == expected
    is_on_host = "argmax" in expected
    assert backend.choose("torch", "numpy") == ("numpy" if is_on_host else "torch")


def test_no_numpy_beside_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton runs, a run takes kernels, and the specifications of what has none."""
    called = pretend(monkeypatch)
    on_gpu(monkeypatch)
    monkeypatch.setattr(dispatch, "find_obstacle", lambda device_type: None)
    for device_type in ("cpu", "cuda"):
        backend = dispatch.Backend(device_type, 1, reads_back=True)
        backend.run(uniforms, *CALL)
        assert called.pop() == "kernel"
        assert backend.run(sample.argmax, torch.eye(3)).tolist() == [0, 1, 2]
        assert backend.choose("torch", "numpy") == "torch"


def test_a_numpy_version_has_the_signature_of_its_specification() -> None:
    for kernel, names in dispatch.NUMPY.items():
        specification = import_module(f"mmaccel.kernels.{kernel}")
        version = import_module(f"mmaccel.kernels.{kernel}_numpy")
        for name in names:
            wanted = inspect.signature(getattr(specification, name))
            assert inspect.signature(getattr(version, name)) == wanted, name
