"""How many files of the library a call enters, and how often it goes from one file to another.

Four calls on tiny random models: `_sample` of a Llama under Jacobi, an image prompt under DART,
`attach`, and `mmaccel generate` from the prompt to the PNG. Counted are calls of Python functions,
generators that go on included; a change is a call in another file than the call before it. The
first two are counted up to the first forward of a module of transformers, and as a whole. Each call
is made once before it is counted, so that self-checks have passed; `attach` is counted both times.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests/fixtures

import torch

import mmaccel
from mmaccel.cli import main as run_command
from mmaccel.pipelines.text_to_image.model import ImageModel
from tests.fixtures.tiny_lms import build_lm
from tests.fixtures.tiny_model import CAPTIONS, build_tiny
from tests.fixtures.tiny_vlms import build_vlm, draw_prompts

ROOT = Path(mmaccel.__file__).parents[1]
PARTS = ("mmaccel", "kernels", "tokenizers_vq", "samplers", "pipelines")
FOLDERS = tuple(f"{ROOT / part}/" for part in PARTS)


class Trace:
    """The calls of project functions, in order.

    Attributes:
        files: of each call.
        n_before: calls up to the first forward of a module of transformers; None without one.
        encoded: texts that the `encode` of an image model was given.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.n_before: int | None = None
        self.encoded: list[str] = []

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function, and record what it calls."""
        sys.setprofile(self._record)
        try:
            return function(*args, **options)
        finally:
            sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(FOLDERS):
            self.files.append(code.co_filename.removeprefix(f"{ROOT}/"))
            if code.co_name == "encode" and isinstance(frame.f_locals["self"], ImageModel):
                self.encoded.append(frame.f_locals["text"])
        elif self.n_before is None and code.co_name == "forward":
            if "/transformers/models/" in code.co_filename:
                self.n_before = len(self.files)

    def row(self, name: str, n: int | None = None) -> str:
        """A line of the table: files, changes and calls of the first `n` calls; None: of all."""
        files = self.files[:n]
        changes = sum(a != b for a, b in zip(files, files[1:]))
        return f"{name:42}{len(set(files)):7}{changes:9}{len(files):8}"


def trace_sample(model: Any, handle: Any, inputs: dict[str, Any]) -> Trace:
    """The `_sample` inside the second of two calls of `generate`."""
    options = dict(max_new_tokens=12, do_sample=False)
    model.generate(**inputs, **options)
    trace, cls = Trace(), type(model)
    inner = cls._sample
    cls._sample = lambda self, *args, **others: trace.run(inner, self, *args, **others)
    model.generate(**inputs, **options)
    cls._sample = inner
    assert not handle.stats.fallbacks, handle.stats.fallbacks
    return trace


def print_table() -> None:
    """Make the four calls."""
    print(f"{'':42}{'files':>7}{'changes':>9}{'calls':>8}")
    vlm = build_vlm("llava")
    for what, model, inputs, reducer in (
        ("Llama", build_lm("llama"), {"input_ids": torch.tensor([[5, 6, 7, 8, 9]])}, None),
        ("image, DART", vlm, draw_prompts("llava", vlm, (1,)), mmaccel.DART(keep=0.5, layer=1)),
    ):
        policy = mmaccel.Jacobi(window=4)
        with mmaccel.attach(model, policy, fused=False, visual_tokens=reducer) as handle:
            trace = trace_sample(model, handle, inputs)
        print(trace.row(f"{what}: _sample to the first forward", trace.n_before))
        print(trace.row(f"{what}: _sample"))
    model = build_lm("llama")
    for name in ("attach, first", "attach, again"):
        trace = Trace()
        trace.run(mmaccel.attach, model, mmaccel.Jacobi(window=4)).detach()
        print(trace.row(name))
    with tempfile.TemporaryDirectory() as folder:
        tiny = build_tiny(Path(folder) / "tiny")
        command = ["generate", CAPTIONS[0], "--model", str(tiny), "--seed", "0", "--threads", "1"]
        for name in ("first", "second"):
            trace = Trace()
            with contextlib.redirect_stdout(io.StringIO()):
                trace.run(run_command, [*command, "--out", str(Path(folder) / name)])
    print(trace.row(f"prompt to PNG, {trace.encoded.count(CAPTIONS[0])} times encoded"))


if __name__ == "__main__":
    print_table()
