"""DiffusionGemma's `generate` under a canvas policy.

The library's `generate` still makes the loop over canvases: lengths, the encoder and its cache,
masks, logits processors, end tokens, stopping criteria and the streamer are its own. Its denoising
step is replaced by a run of the policy that fills a whole canvas.

Source: `DiffusionGemmaGenerationMixin`, transformers 5.23.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Layout, Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.attach.service import Methods
from mmaccel.pipelines.diffusion_lm.diffusion_gemma.canvas import (
    AfterPass,
    CanvasLayout,
    GemmaDecoder,
    StopRule,
    canvas_noise,
)
from mmaccel.pipelines.diffusion_lm.pipeline_service import PolicyService
from mmaccel.pipelines.generate_call import bind_call, count_to_end
from mmaccel.pipelines.original_methods import original
from mmaccel.policies import CanvasInterrupt
from mmaccel.results import Generation, Stats
from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
from mmaccel.samplers.noise import Noise, draw_seed
from mmaccel.samplers.sampling_params import SamplingParams

REFERENCE = (
    "one commit a pass over the model's decoder with its schedule and the logits it carries; "
    "not the library's sampler"
)


def is_bounded(policy: Any) -> bool:
    """Whether a policy ignores the library's rule, which ends canvases and spends without bound."""
    return policy.exactness != "relaxed" or isinstance(policy, EntropyBounded)


class GemmaRun:
    """The canvases of one call, one after the other.

    Args:
        model: a `DiffusionGemmaForBlockDiffusion`.
        policy: a canvas policy.
        seed: one, one per row, or None for one out of torch's global generator.
        layout: of all slots after the prompt.
        params: applied after the logits processors.
        change_config: changes the call's generation configuration in place.
        after_pass: see `StopRule`.

    Attributes:
        stats: of all canvases so far. Its `fallbacks` say why the library's own sampler runs.
        passes: `[B]` int64, of all canvases so far.
    """

    def __init__(
        self,
        model: Any,
        policy: Any,
        seed: int | Sequence[int] | None,
        layout: Layout | None,
        params: SamplingParams | None = None,
        change_config: Callable[[Any], None] | None = None,
        after_pass: AfterPass | None = None,
    ) -> None:
        self._model, self._policy, self._seed, self._layout = model, policy, seed, layout
        self._params = params or SamplingParams()
        self._change_config = change_config
        self._after_pass = after_pass
        self._noise: Noise | None = None
        self._index = 0
        self._n_prompt = 0
        self._steps = 1
        self._ends: Tensor | None = None
        self._pad: int | None = None
        self.passes: Any = 0
        self.stats = Stats(policy=repr(policy), exactness=policy.exactness, reference=REFERENCE)

    def begin(self, batch: int, device: torch.device) -> None:
        """Make the noise.

        Raises:
            OptionError: seeds for another batch.
        """
        seed = draw_seed(None) if self._seed is None else self._seed
        self._noise = Noise.from_seed(seed, batch, device)
        self.stats.seed = seed

    def configure(self, config: Any, device: torch.device) -> None:
        """Read a call's generation configuration.

        A row ends at its end token only where there is a padding token to put after it, as in the
        library.
        """
        if self._change_config is not None:
            self._change_config(config)
        self._steps = config.max_denoising_steps
        self._pad = config.pad_token_id
        ends = config.eos_token_id
        if ends is not None and self._pad is not None:
            self._ends = torch.as_tensor(ends, device=device).view(-1)

    def fill(self, step: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Fill the next canvas.

        Args:
            step: the arguments of the library's denoising step.

        Returns:
            Tokens `[B, L]` int64, and the scores `[B, L, V]` of the last pass.

        Raises:
            CanvasInterrupt: with the tokens of all canvases so far.
        """
        assert self._noise is not None
        ids: Tensor = step["input_ids"]
        batch, length = step["current_canvas"].shape
        if self._index == 0:
            self._n_prompt = ids.shape[1]
        before = ids[:, self._n_prompt :]
        ended = self._holds_end(before)
        pad = 0 if self._pad is None else self._pad
        layout = CanvasLayout(self._layout, self._index * length, ended, pad)
        noise = canvas_noise(self._noise, self._index)
        config = self._model.config
        vocab_size = config.get_text_config().vocab_size
        dtype = self._model.model.decoder.embed_tokens.weight.dtype
        decoder = GemmaDecoder(step, vocab_size, length, self._steps, dtype)
        criterion = None if is_bounded(self._policy) else step["diffusion_stopping_criteria"]
        rule = StopRule(criterion, decoder, self._params, noise, layout, self._after_pass)
        prompt = Prompt(  # one column: the encoder's cache holds the prompt
            ids.new_zeros(batch, 1),
            torch.ones_like(ids[:, 0]),
            stop_tokens=self._ends,
            layout=layout,
        )
        on_step = None if criterion is None and self._after_pass is None else rule
        try:
            generation = self._policy.sample(
                decoder, prompt, length, params=self._params, noise=noise, on_step=on_step
            )
        except CanvasInterrupt as stop:
            raise self._interrupted(stop, before) from stop
        slots = torch.arange(length, device=ids.device)
        tokens = torch.where(slots < generation.lengths[:, None], generation.tokens, pad)
        if criterion is not None:
            tokens = torch.where(rule.ended[:, None], rule.tokens, tokens)
        self._count(generation, decoder, rule, tokens, ended)
        self._index += 1
        return tokens, decoder.scores

    def _holds_end(self, tokens: Tensor) -> Tensor:
        if self._ends is None:
            return torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        return torch.isin(tokens, self._ends).any(1)

    def _count(
        self,
        generation: Generation,
        decoder: GemmaDecoder,
        rule: StopRule,
        tokens: Tensor,
        ended: Tensor,
    ) -> None:
        stats, new = self.stats, generation.stats
        n_slots = torch.full_like(generation.lengths, tokens.shape[1])
        if self._ends is not None:
            n_slots = count_to_end(tokens, self._ends)
        stats.exactness = new.exactness
        stats.dtype = new.dtype
        stats.tokens += int(torch.where(ended, 0, n_slots).sum())
        stats.passes += new.passes
        stats.prefill_passes += 1
        stats.row_passes += new.row_passes
        stats.nats += new.nats + rule.nats
        stats.positions += decoder.positions
        stats.canvases += new.canvases
        stats.forward_seconds += new.forward_seconds
        so_far = new.notes if self._index == 0 else stats.notes
        stats.notes = [note for note in so_far if note in new.notes]  # what holds of all canvases
        longest = max(len(stats.accepted), len(new.accepted))
        pairs = (
            counts + [0] * (longest - len(counts)) for counts in (stats.accepted, new.accepted)
        )
        stats.accepted = [sum(pair) for pair in zip(*pairs)]
        self.passes = self.passes + generation.passes

    def _interrupted(self, stop: CanvasInterrupt, before: Tensor) -> CanvasInterrupt:
        own = stop.generation
        tokens = torch.cat([before, own.tokens], 1)
        committed = torch.cat([torch.ones_like(before, dtype=torch.bool), stop.is_committed], 1)
        self.stats.passes += own.stats.passes
        lengths = before.shape[1] + own.lengths
        passes = self.passes + own.passes
        return CanvasInterrupt(Generation(tokens, lengths, passes, self.stats), committed)


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
        """The model of the target."""
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
        """The library's `generate`, whose canvases are filled by `run`.

        Raises:
            BusyError: another call is under way.
            UnsupportedModelError: with `strict` or a layout, a call that only the library's own
                sampler can serve.
        """
        own = original(self._model, "generate")
        ids = (bind_call(own, args, options) or ({}, {}))[1].get("input_ids")
        if ids is None or ids.ndim != 2:
            return own(*args, **options)  # which says what is wrong with them
        began = time.perf_counter()
        with self.running(run):
            run.begin(ids.shape[0], ids.device)
            out = own(*args, **options)
        run.stats.seconds = time.perf_counter() - began
        self.record(run.stats)
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
            run.stats.fallbacks.append(reason)
            return config, others
        run.configure(config, model.device)
        return config, others

    def _step(self, model: Any, **step: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = self.call
        if run is None or run.stats.fallbacks:
            if run is not None:
                run.stats.passes += 1
            out: tuple[Tensor, ...] = original(model, "_denoising_step")(**step)
            return out  # type: ignore[return-value]
        tokens, scores = run.fill(step)
        return tokens, tokens, scores, torch.ones_like(step["finished_denoising"])

    def _tokens_per_forward(self, model: Any, ids: Tensor, passes: Tensor, *others: Any) -> Any:
        own: Callable[..., Any] = original(model, "_compute_tokens_per_forward").__func__  # type: ignore[attr-defined]
        if self.call is not None and not self.call.stats.fallbacks:
            passes = self.call.passes.clamp(min=1)
        return own(ids, passes, *others)
