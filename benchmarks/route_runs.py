"""Three routes to the same images: the library's own `generate`, a policy attached to it, and the
image pipeline; what each costs.

- library: transformers' `generate`, nothing attached; its draws are its own;
- library-static: the same with a static cache, whose pass transformers compiles on a GPU;
- library-compiled: the same, compiled on every device; prompts are padded to one length, so that it
  is compiled once a batch size;
- transformers: the same call under a policy;
- direct: `mmaccel.TextToImage`, which computes the image ids of the head alone.

Our passes run by one of `FORWARDS`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Policy
from mmaccel.handle import attach
from mmaccel.pipelines.models.scenes_vocabulary import CaptionWords
from mmaccel.pipelines.runner.engine import UseGraphs
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.pipelines.text_to_image.registry import find_source
from mmaccel.results import Progress, Stats
from mmaccel.samplers.window.autoregressive import Autoregressive
from mmaccel.samplers.window.jacobi import Jacobi

PLAIN, WINDOWS = Autoregressive(), (16, 32, "adaptive")
FORWARDS: dict[str, dict[str, Any]] = {  # arguments of `attach` and `TextToImage.from_pretrained`
    "auto": {},
    "model": {"fused": False},
    "fused": {"fused": True, "compile": False},
    "compiled": {"compile": True},
}
_LONGEST = 24  # ids of a caption of `scenes` at most


@dataclass(frozen=True)
class Way:
    """A route with its policy, at one batch size and guidance scale; no policy: the library's."""

    route: str
    policy: Policy | None
    batch_size: int
    guidance: float
    forward: str = "auto"  # a name of `FORWARDS`


@dataclass(frozen=True)
class Piece:
    """One batch made in one way: tokens `[B, L]` int64, None of its statistics for the library."""

    tokens: Tensor
    stats: Stats | None
    seconds: float


class Routes:
    """The same model three times, as each route loads it, in float32.

    Args:
        name: a demo model or a folder.
        length: tokens of an image; None makes whole images.
        device: where to run.
        cuda_graphs: of the image pipeline, see `mmaccel.pipelines.runner.engine.Engine`.
    """

    def __init__(
        self,
        name: str = "scenes",
        length: int | None = None,
        device: torch.device | str = "cpu",
        cuda_graphs: UseGraphs = "auto",
    ) -> None:
        self._name, self._device, self._graphs = name, device, cuda_graphs
        self._pipes: dict[str, TextToImage] = {}
        self._models: dict[str, Any] = {}
        self.pipe, self.model = self._pipe("auto"), self.model_of("auto")
        vocab_size = self.pipe.image_model.layout.vocab_size
        self.words = CaptionWords.load(find_source(name), vocab_size)
        self.length = self.pipe.length if length is None else length
        self.unused = list(range(self.words.n_image_tokens, self.words.vocab_size))

    def _pipe(self, forward: str) -> TextToImage:
        if forward not in self._pipes:
            self._pipes[forward] = TextToImage.from_pretrained(
                self._name,
                device=self._device,
                dtype="float32",
                cuda_graphs=self._graphs,
                **FORWARDS[forward],
            )
        return self._pipes[forward]

    def model_of(self, name: str) -> Any:
        """A copy of the model: one for each forward, as packed weights and compiled passes stay."""
        from transformers import AutoModelForCausalLM

        if name not in self._models:
            folder = find_source(self._name)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            self._models[name] = model.to(self._device)
        return self._models[name]

    def run(self, way: Way, captions: Sequence[str], seeds: Sequence[int]) -> Piece:
        """Make one batch, and take the time."""
        torch.manual_seed(seeds[0])  # of the library's own draws
        began = time.perf_counter()
        if way.route == "direct":
            made = self._pipe(way.forward)(
                captions,
                policy=way.policy,
                seed=seeds,
                guidance_scale=way.guidance,
                on_step=self._stop if self.length < self.pipe.length else None,
            )
            seconds = time.perf_counter() - began - made.stats.pixel_seconds
            return Piece(made.tokens[:, : self.length], made.stats, seconds)
        if way.policy is None:
            model = self.model_of(way.route)
            return Piece(self._generate(model, captions, way), None, time.perf_counter() - began)
        model = self.model_of(way.forward)
        run = attach(model, way.policy, seed=list(seeds), strict=True, **FORWARDS[way.forward])
        try:
            tokens = self._generate(model, captions, way)
        finally:
            run.detach(keep_packed=True)
        return Piece(tokens, run.stats, time.perf_counter() - began)

    def _generate(self, model: Any, captions: Sequence[str], way: Way) -> Tensor:
        words = self.words
        ids = [words.encode(caption) for caption in captions]
        longest = max(map(len, ids)) if way.route != "library-compiled" else _LONGEST
        padded = [[words.pad] * (longest - len(row)) + row for row in ids]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
        guidance: dict[str, Any] = {}
        if way.guidance != 1:
            empty = torch.tensor([words.unconditional()] * len(ids), device=model.device)
            guidance = {"guidance_scale": way.guidance, "negative_prompt_ids": empty}
        if way.route in ("library-static", "library-compiled"):
            guidance["cache_implementation"] = "static"
        if way.route == "library-compiled":
            guidance["compile_config"] = _compile_everywhere()
        out = model.generate(
            torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            do_sample=True,
            max_new_tokens=self.length,
            top_k=0,
            suppress_tokens=self.unused,
            **guidance,
        )
        tokens: Tensor = out[:, longest:].cpu()  # waits for a device
        return tokens

    def _stop(self, progress: Progress) -> Tensor:
        return torch.full_like(progress.lengths, self.length)


def _compile_everywhere() -> Any:
    """What makes `generate` compile its pass on a CPU, too: a switch of transformers' own tests."""
    from transformers import CompileConfig

    config: Any = CompileConfig(mode="default", fullgraph=False)
    config._compile_all_devices = True
    return config


def make_ways(
    batch_sizes: Sequence[int],
    scales: Sequence[float],
    windows: Sequence[Any] = WINDOWS,
    drafts: str = "neighbour",
    forwards: Sequence[str] = ("auto",),
    compiles_library: bool = False,
) -> list[Way]:
    """All that is compared; the library first among those of a batch size and a scale.

    Args:
        batch_sizes, scales: of every way.
        windows, drafts: of `Jacobi`.
        forwards: names of `FORWARDS`.
        compiles_library: whether transformers' own `generate` also runs compiled.
    """
    jacobi = [Jacobi(window, drafts) for window in windows]
    library = ["library", "library-compiled"] if compiles_library else ["library"]
    plan: list[tuple[str, Policy | None, str]] = [(route, None, "") for route in library]
    for forward in forwards:
        plan += [("transformers", policy, forward) for policy in (PLAIN, *jacobi)]
        plan += [("direct", policy, forward) for policy in (PLAIN, *jacobi)]
    return [
        Way(route, policy, size, scale, forward)
        for size in batch_sizes
        for scale in scales
        for route, policy, forward in plan
    ]


def summarize(made: dict[Way, list[Piece]]) -> list[dict[str, Any]]:
    """One row per way, over the batches that all ways of its batch size and scale have finished."""
    rows = []
    for way, own in made.items():
        same = {
            (w.route, w.policy, w.forward): p for w, p in made.items() if _place(w) == _place(way)
        }
        n = min(map(len, same.values()))
        if n == 0:
            continue
        pieces, counted = own[:n], [piece.stats for piece in own[:n] if piece.stats is not None]
        plain = next(p for (route, policy, _), p in same.items() if policy == PLAIN)
        own_direct = same.get(("direct", way.policy, way.forward))
        direct = own_direct if way.route == "transformers" else None
        seconds, images = _seconds(pieces), sum(len(piece.tokens) for piece in pieces)
        total, passes = sum(s.tokens for s in counted), sum(s.row_passes for s in counted)
        rows.append(
            {
                **asdict(way) | {"policy": None if way.policy is None else repr(way.policy)},
                "images": images,
                "seconds": seconds / images,
                "tokens_per_pass": total / passes if counted else 1.0,
                "passes": passes / images if counted else float(pieces[0].tokens.shape[1]),
                "speed_up": _seconds(same["library", None, ""][:n]) / seconds,
                "of_direct": None if direct is None else seconds / _seconds(direct[:n]),
                "identical": sum(
                    int((a.tokens == b.tokens).all(1).sum()) for a, b in zip(pieces, plain)
                ),
            }
        )
    return rows


def _place(way: Way) -> tuple[int, float]:
    return way.batch_size, way.guidance


def _seconds(pieces: Sequence[Piece]) -> float:
    return sum(piece.seconds for piece in pieces)
