"""DiffusionGemma's `generate` under a canvas policy: its call and what it returns stay.

The library's `generate` goes on making the loop over canvases: lengths, the encoder and its cache,
masks, logits processors, end tokens, stopping criteria, streamer. Its step within a canvas is
replaced by a run of the policy over the whole canvas.

Source: `DiffusionGemmaGenerationMixin`, transformers 5.23.

The canvases of one call of DiffusionGemma's `generate`, one after the other.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmaccel.canvas_contracts import CanvasInterrupt
from mmaccel.contracts import Layout, Prompt
from mmaccel.errors import BusyError, OptionError, UnsupportedModelError
from mmaccel.pipelines.attach.fallback import find_caller
from mmaccel.pipelines.attach.layout_processor import check_vocabulary
from mmaccel.pipelines.attach.patching import Injection, original
from mmaccel.pipelines.diffusion_lm.diffusion_gemma.canvas import (
    CanvasLayout,
    GemmaDecoder,
    StopRule,
    Then,
    canvas_noise,
)
from mmaccel.results import Generation, Stats
from mmaccel.samplers.canvas.cache_plan import as_plan
from mmaccel.samplers.canvas.entropy_bounded import EntropyBounded
from mmaccel.samplers.canvas.lossless_unmask import LosslessUnmask
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

REFERENCE = (
    "one commit a pass over the model's decoder with its schedule and the logits it carries; "
    "not the library's sampler"
)


class GemmaRun:
    """One call.

    Args:
        model: a `DiffusionGemmaForBlockDiffusion`.
        policy: a canvas policy.
        seed: one, one per row, or None for one out of torch's global generator.
        layout: of all slots behind the prompt.
        filters: behind the logits processors.
        change: puts other values into a call's generation configuration.
        then: see `StopRule`.

    Attributes:
        stats: of all canvases so far.
        passes: `[B]` int64.
        reason: why the library's own sampler runs, or an empty text.
    """

    def __init__(
        self,
        model: Any,
        policy: Any,
        seed: int | Sequence[int] | None,
        layout: Layout | None,
        params: SamplingParams | None = None,
        change: Callable[[Any], None] | None = None,
        then: Then | None = None,
    ) -> None:
        self._model, self._policy, self._seed, self._layout = model, policy, seed, layout
        self._filters, self._change = params or SamplingParams(), change
        self._then, self.reason = then, ""
        self._noise: Noise | None = None
        self._index, self._n_prompt, self._steps = 0, 0, 1
        self._ends: Tensor | None = None
        self._pad: int | None = None
        self.passes: Any = 0
        self.stats = Stats(policy=repr(policy), exactness=policy.exactness, reference=REFERENCE)

    def begin(self, batch: int, device: torch.device) -> None:
        """Make the noise.

        Raises:
            OptionError: seeds for another batch.
        """
        seed = int(torch.randint(2**63 - 1, ())) if self._seed is None else self._seed
        self._noise = Noise.from_seed(seed, batch, device)

    def configure(self, config: Any, device: torch.device) -> None:
        """Take what a call's generation configuration says.

        A row ends at its end token where there is padding to put behind it, as in the library.
        """
        if self._change is not None:
            self._change(config)
        self._steps, self._pad = config.max_denoising_steps, config.pad_token_id
        ends = config.eos_token_id
        if ends is not None and self._pad is not None:
            self._ends = torch.as_tensor(ends, device=device).view(-1)

    def fill(self, step: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Fill the next canvas.

        Args:
            step: what `generate` hands to its denoising step.

        Returns:
            Tokens `[B, L]` int64, and the scores `[B, L, V]` of the last pass.

        Raises:
            CanvasInterrupt: with all canvases so far.
        """
        assert self._noise is not None
        ids: Tensor = step["input_ids"]
        batch, length = step["current_canvas"].shape
        if self._index == 0:
            self._n_prompt = ids.shape[1]
        made_before = ids[:, self._n_prompt :]
        ended = self._holds_end(made_before)
        pad = 0 if self._pad is None else self._pad
        layout = CanvasLayout(self._layout, self._index * length, ended, pad)
        noise = canvas_noise(self._noise, self._index)
        config = self._model.config
        vocab_size = config.get_text_config().vocab_size
        dtype = self._model.model.decoder.embed_tokens.weight.dtype
        decoder = GemmaDecoder(step, vocab_size, length, self._steps, dtype)
        promises = self._policy.exactness != "relaxed" or isinstance(self._policy, EntropyBounded)
        criterion = None if promises else step["diffusion_stopping_criteria"]
        rule = StopRule(criterion, decoder, self._filters, noise, layout, self._then)
        prompt = Prompt(  # one column: the encoder's cache stands for the prompt
            ids.new_zeros(batch, 1), torch.ones_like(ids[:, 0]), stop_tokens=self._ends,
            layout=layout,
        )  # fmt: skip
        watch = None if criterion is None and self._then is None else rule
        try:
            made = self._policy.sample(
                decoder, prompt, length, params=self._filters, noise=noise, on_step=watch
            )
        except CanvasInterrupt as stop:
            raise self._interrupted(stop, made_before) from stop
        slots = torch.arange(length, device=ids.device)
        tokens = torch.where(slots < made.lengths[:, None], made.tokens, pad)
        if criterion is not None:
            tokens = torch.where(rule.ended[:, None], rule.tokens, tokens)
        self._count(made, decoder, rule, tokens, ended)
        self._index += 1
        return tokens, decoder.scores

    def _holds_end(self, tokens: Tensor) -> Tensor:
        if self._ends is None:
            return torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        return torch.isin(tokens, self._ends).any(1)

    def _count(
        self, made: Generation, decoder: GemmaDecoder, rule: StopRule, tokens: Tensor, ended: Tensor
    ) -> None:
        stats, new = self.stats, made.stats
        n_slots = torch.full_like(made.lengths, tokens.shape[1])
        if self._ends is not None:
            is_end = torch.isin(tokens, self._ends)
            index = torch.arange(tokens.shape[1], device=tokens.device)
            n_slots = torch.where(is_end, index + 1, tokens.shape[1]).amin(1)
        stats.tokens += int(torch.where(ended, 0, n_slots).sum())
        stats.passes += new.passes
        stats.prefill_passes += 1
        stats.row_passes += new.row_passes
        stats.nats += new.nats + rule.nats
        stats.positions += decoder.positions
        stats.forward_seconds += new.forward_seconds
        so_far = new.notes if self._index == 0 else stats.notes
        stats.notes = [note for note in so_far if note in new.notes]  # what holds of all canvases
        longest = max(len(stats.accepted), len(new.accepted))
        pairs = (
            counts + [0] * (longest - len(counts)) for counts in (stats.accepted, new.accepted)
        )
        stats.accepted = [sum(pair) for pair in zip(*pairs)]
        self.passes = self.passes + made.passes

    def _interrupted(self, stop: CanvasInterrupt, before: Tensor) -> CanvasInterrupt:
        own = stop.generation
        tokens = torch.cat([before, own.tokens], 1)
        committed = torch.cat([torch.ones_like(before, dtype=torch.bool), stop.is_committed], 1)
        self.stats.passes += own.stats.passes
        passes = self.passes + own.passes
        made = Generation(tokens, before.shape[1] + own.lengths, passes, self.stats)
        return CanvasInterrupt(made, committed)


class GemmaService:
    """Serves the calls of one model.

    Args:
        model: a `DiffusionGemmaForBlockDiffusion`.
        policy, seed, strict, layout: see `mmaccel.attach`.

    Attributes:
        history: statistics of all calls, the last one at the end.
    """

    def __init__(
        self,
        model: Any,
        policy: Any,
        seed: int | Sequence[int] | None = None,
        strict: bool = False,
        layout: Layout | None = None,
    ) -> None:
        self.policy, self.seed, self.strict, self.layout = policy, seed, strict, layout
        self.history: list[Stats] = []
        self._model = model
        self._run: GemmaRun | None = None

    def inject(self, injection: Injection) -> None:
        """Put the service in the place of the model's own methods.

        Raises:
            AttachError: the model has a policy already.
        """
        injection.add(
            self._model,
            {
                "generate": as_function(self._generate),
                "_prepare_generation_config": as_function(self._configure),
                "_denoising_step": as_function(self._step),
                "_compute_tokens_per_forward": as_function(self._rate),
            },
        )

    def serve(self, run: GemmaRun, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The library's `generate` with a run of the policy in it.

        Raises:
            BusyError: another call is under way.
            UnsupportedModelError: with `strict` or a layout, a call that only the library's own
                sampler can serve.
        """
        own = original(self._model, "generate")
        if self._run is not None:
            raise BusyError(
                "generate: expected one call at a time, received one while another runs; load the "
                "model a second time for it"
            )
        try:
            ids = inspect.signature(own).bind(*args, **options).arguments.get("input_ids")
        except TypeError:
            return own(*args, **options)  # which says what is wrong with them
        if ids is None or ids.ndim != 2:
            return own(*args, **options)
        began = time.perf_counter()
        run.begin(ids.shape[0], ids.device)
        self._run = run
        try:
            out = own(*args, **options)
        finally:
            self._run = None
        run.stats.seconds = time.perf_counter() - began
        self.history.append(run.stats)
        if run.reason:
            text = f"mmaccel: ran without the policy: {run.reason}"
            warnings.warn(text, stacklevel=find_caller())
        return out

    def _generate(self, model: Any, *args: Any, **options: Any) -> Any:
        run = GemmaRun(model, self.policy, self.seed, self.layout)
        return self.serve(run, args, options)

    def _configure(self, model: Any, *args: Any, **options: Any) -> Any:
        config, others = original(model, "_prepare_generation_config")(*args, **options)
        run = self._run
        if run is None:
            return config, others
        if "decoder_input_ids" in others:
            run.reason = "a canvas to begin with (decoder_input_ids)"
            if self.strict or self.layout is not None:
                raise UnsupportedModelError(
                    f"generate: expected a call that {self.policy!r} can serve, received "
                    f"{run.reason}; leave it out, or attach with strict=False and no layout"
                )
            run.stats.fallbacks.append(run.reason)
            return config, others
        run.configure(config, model.device)
        return config, others

    def _step(self, model: Any, **step: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        run = self._run
        if run is None or run.reason:
            if run is not None:
                run.stats.passes += 1
            out: tuple[Tensor, ...] = original(model, "_denoising_step")(**step)
            return out  # type: ignore[return-value]
        tokens, scores = run.fill(step)
        return tokens, tokens, scores, torch.ones_like(step["finished_denoising"])

    def _rate(self, model: Any, ids: Tensor, passes: Tensor, *others: Any) -> Any:
        own: Callable[..., Any] = original(model, "_compute_tokens_per_forward").__func__  # type: ignore[attr-defined]
        if self._run is not None and not self._run.reason:
            passes = self._run.passes.clamp(min=1)
        return own(ids, passes, *others)


def as_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a class can hold, of a method of another object."""
    return lambda *args, **options: method(*args, **options)


def check_gemma(policy: Any, name: str) -> None:
    """Refuse what cannot fill canvases of this model.

    Raises:
        OptionError: with the reason.
    """
    reason = ""
    if isinstance(policy, LosslessUnmask):
        reason = "a pass carries the logits of the one before, so that drafts cannot be verified"
    cache = as_plan(getattr(policy, "cache", "none"))
    if cache.kind != "none" or cache.far is not None:
        reason = "its encoder keeps what can be kept, and every pass is over the whole canvas"
    if reason:
        raise OptionError(
            f"policy: expected another one for a {name}, received {policy!r}; {reason}; "
            "try EntropyBounded()"
        )


def serve(
    model: Any,
    policy: Any,
    seed: int | Sequence[int] | None,
    strict: bool,
    layout: Layout | None,
) -> tuple[GemmaService, Injection]:
    """Attach a checked policy to a model.

    Raises:
        OptionError: a policy that cannot fill its canvases, or a layout of another vocabulary.
        AttachError: the model has a policy already.
    """
    check_gemma(policy, type(model).__name__)
    check_vocabulary(layout, model)
    service, injection = GemmaService(model, policy, seed, strict, layout), Injection()
    service.inject(injection)
    return service, injection
