"""DiffusionGemma's `generate`, whose denoising step is a policy's run that fills a whole canvas.

The loop over canvases (lengths, encoder and cache, masks, processors, ends, streamer) is the
library's own. Source: `DiffusionGemmaGenerationMixin`, transformers 5.23.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Layout, Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.attach.service import Methods
from mmaccel.pipelines.hosts.diffusion_lm.diffusion_gemma.canvas import GemmaCanvas
from mmaccel.pipelines.hosts.diffusion_lm.pipeline_service import PolicyService
from mmaccel.pipelines.hosts.generate_call import bind_call, count_to_end
from mmaccel.pipelines.hosts.original_methods import original
from mmaccel.policies import CanvasInterrupt
from mmaccel.results import Generation, Stats, add_stats
from mmaccel.samplers.noise import Noise, draw_seed
from mmaccel.samplers.sampling_params import SamplingParams

REFERENCE = (
    "one commit a pass over the model's decoder with its schedule and the logits it carries; "
    "not the library's sampler"
)


@dataclass
class GemmaRun:
    """The canvases of one call, one after the other."""

    model: Any
    policy: Any
    seed: int | Sequence[int] | None  # None: one out of torch's global generator
    layout: Layout | None  # of all slots after the prompt
    params: SamplingParams = field(default_factory=SamplingParams)  # after the logits processors
    change_config: Callable[[Any], None] | None = None  # in place
    # (pass from 0, tokens [B, L], scores [B, L, V]), the likeliest where nothing is committed
    after_pass: Callable[[int, Tensor, Tensor], None] | None = None
    noise: Noise | None = None  # of the rows, once `begin` was called
    n_prompt: int = 0
    steps: int = 1  # this, `pad` and `ends`: of the call's configuration
    pad: int | None = None
    ends: Tensor | None = None
    parts: list[Stats] = field(default_factory=list)  # of every canvas so far
    passes: Any = 0  # [B] int64, of all canvases so far
    fallbacks: list[str] = field(default_factory=list)  # why the library's own sampler runs
    own_passes: int = 0  # of that sampler

    def begin(self, ids: Tensor) -> None:
        self.seed = draw_seed(None) if self.seed is None else self.seed
        self.noise = Noise.from_seed(self.seed, len(ids), ids.device)
        self.n_prompt = ids.shape[1]

    def configure(self, config: Any, device: torch.device) -> None:
        """Read a call's configuration: a row has an end only where padding can follow."""
        if self.change_config is not None:
            self.change_config(config)
        self.steps = config.max_denoising_steps
        self.pad = config.pad_token_id
        ends = config.eos_token_id
        if ends is not None and self.pad is not None:
            self.ends = torch.as_tensor(ends, device=device).view(-1)

    def fill(self, step: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Tokens `[B, L]` int64 of the next canvas, and the scores `[B, L, V]` of its last pass.

        `step` has the arguments of the library's. A `CanvasInterrupt` has all canvases' tokens.
        """
        canvas = GemmaCanvas(step, self)
        ids: Tensor = step["input_ids"]
        prompt = Prompt(  # one column: the encoder's cache holds the prompt
            ids.new_zeros(len(ids), 1),
            torch.ones_like(ids[:, 0]),
            stop_tokens=self.ends,
            layout=canvas.layout,
        )
        try:
            generation = self.policy.sample(
                canvas,
                prompt,
                canvas.length,
                params=self.params,
                noise=canvas.noise,
                on_step=canvas.on_step if canvas.watches else None,
            )
        except CanvasInterrupt as stop:
            last, before = stop.generation, canvas.before
            self.parts.append(last.stats)
            tokens = torch.cat([before, last.tokens], 1)
            committed = torch.cat([torch.ones_like(before, dtype=torch.bool), stop.is_committed], 1)
            lengths, passes = before.shape[1] + last.lengths, self.passes + last.passes
            so_far = Generation(tokens, lengths, passes, self.report())
            raise CanvasInterrupt(so_far, committed) from stop
        slots = torch.arange(canvas.length, device=ids.device)
        is_row = slots < generation.lengths[:, None]
        tokens = torch.where(is_row, generation.tokens, self.pad or 0)
        if canvas.tokens.numel():
            tokens = torch.where(canvas.ended[:, None], canvas.tokens, tokens)
        n_slots = torch.full_like(generation.lengths, canvas.length)
        if self.ends is not None:
            n_slots = count_to_end(tokens, self.ends)
        stats = generation.stats
        stats.tokens = int(torch.where(canvas.is_known, 0, n_slots).sum())
        stats.prefill_passes, stats.positions = 1, canvas.positions
        stats.nats += canvas.nats
        self.parts.append(stats)
        self.passes = self.passes + generation.passes
        return tokens, canvas.scores

    def report(self) -> Stats:
        """Statistics of all canvases so far; notes are those that hold of each."""
        empty = Stats(policy=repr(self.policy), exactness=self.policy.exactness)
        parts = self.parts or [empty]
        stats = add_stats(parts)
        stats.notes = [n for n in parts[0].notes if all(n in part.notes for part in parts)]
        stats.reference, stats.seed = REFERENCE, self.seed
        stats.fallbacks = self.fallbacks
        stats.passes += self.own_passes
        return stats


class GemmaService(PolicyService):
    """Serves the calls of one `DiffusionGemmaForBlockDiffusion`."""

    whole = "its prompt is in the library's own cache, and its canvas is computed whole"

    def open(self) -> None:
        self._model = self.find_model()
        self.n_ids = self._model.get_output_embeddings().weight.shape[0]

    def lack(self, word: str, part: Any = None) -> str:
        if word == "verified canvases":
            return "a pass carries the logits of the one before"
        if word == "mask token":
            return "its open slots hold random tokens"
        return super().lack(word, part)

    def find_model(self) -> Any:
        return self.target

    def methods(self) -> list[tuple[Any, Methods]]:
        methods: Methods = {
            "generate": self._generate,
            "_prepare_generation_config": self._configure,
            "_denoising_step": self._step,
            "_compute_tokens_per_forward": self._tokens_per_forward,
        }
        return [(self._model, methods)]

    def run(self, run: GemmaRun, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The library's `generate`, whose canvases are filled by `run`."""
        own = original(self._model, "generate")
        ids = (bind_call(own, args, options) or ({}, {}))[1].get("input_ids")
        if ids is None or ids.ndim != 2:
            return own(*args, **options)  # which says what is wrong with them
        began = time.perf_counter()
        with self.running(run):
            run.begin(ids)
            out = own(*args, **options)
        stats = run.report()
        stats.seconds = time.perf_counter() - began
        self.record(stats)
        return out

    def _generate(self, model: Any, *args: Any, **options: Any) -> Any:
        return self.run(GemmaRun(model, self.policy, self.seed, self.layout), args, options)

    def _configure(self, model: Any, *args: Any, **options: Any) -> Any:
        config, others = original(model, "_prepare_generation_config")(*args, **options)
        run = self.call
        if run is None:
            return config, others
        if "decoder_input_ids" in others:
            reason = "a canvas to begin with (decoder_input_ids)"
            if self.strict or self.layout is not None:
                raise UnsupportedModelError(
                    f"generate: expected a call that {self.policy!r} can serve, received "
                    f"{reason}; leave it out, or attach with strict=False and no layout"
                )
            run.fallbacks.append(reason)
            return config, others
        run.configure(config, model.device)
        return config, others

    def _step(self, model: Any, **step: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = self.call
        if run is None or run.fallbacks:
            if run is not None:
                run.own_passes += 1
            out: tuple[Tensor, ...] = original(model, "_denoising_step")(**step)
            return out  # type: ignore[return-value]
        tokens, scores = run.fill(step)
        return tokens, tokens, scores, torch.ones_like(step["finished_denoising"])

    def _tokens_per_forward(self, model: Any, ids: Tensor, passes: Tensor, *others: Any) -> Any:
        own: Callable[..., Any] = original(model, "_compute_tokens_per_forward").__func__  # type: ignore[attr-defined]
        if self.call is not None and not self.call.fallbacks:
            passes = self.call.passes.clamp(min=1)
        return own(ids, passes, *others)
