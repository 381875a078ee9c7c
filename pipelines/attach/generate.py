"""The service of `generate`: calls of a transformers model, decoded by a policy.

`generate` looks its decoding loops up on the model's class. The policy replaces `_sample`. The
other loops (beam search, assisted decoding) run as before, and the statistics say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Layout, Policy
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.attach import layer_methods
from mmaccel.pipelines.attach.fallback import Fallback
from mmaccel.pipelines.attach.patching import as_function
from mmaccel.pipelines.attach.prompt_pass import open_prompt
from mmaccel.pipelines.attach.series import SeriesOfThreads
from mmaccel.pipelines.attach.step_outputs import Columns, StepOutputs
from mmaccel.pipelines.attach.streaming import TokenStreamer
from mmaccel.pipelines.causal_lm.family import CausalLM
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.generate_call import (
    PER_LAYER,
    GenerateCall,
    Task,
    find_obstacles,
    hand_over,
)
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.pipelines.logits.processor_chain import LogitsChain, take_warpers
from mmaccel.pipelines.original_methods import original
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.pipelines.transformers_release import VERSION, describe_untested
from mmaccel.pipelines.vision_language.layers import PromptCuts
from mmaccel.pipelines.vision_language.reduction import VisualReduction
from mmaccel.pipelines.vision_language.visual_call import VisualCall
from mmaccel.results import Progress, Stats, add_stats
from mmaccel.samplers.drafting.coarse import Opened, share_opened, use_folder
from mmaccel.samplers.drafting.states import StateModel
from mmaccel.samplers.noise import Noise, draw_seed

_UNKNOWN_LOOP = "a decoding loop that is not transformers' own"
_CALLERS_LOOP = "custom_generate, a decoding loop of the caller's own"
_BOOKS = "a model of several codebooks a step"
_MODELS_LOOP = "a decoding loop of the model's own"
_BATCH = "transformers' own continuous batching; generate takes a padded batch"
_BATCHES = ("generate_batch", "init_continuous_batching")
_OTHER_LOOPS = {"_beam_search": "beam search", "_assisted_decoding": "assisted decoding"}


@dataclass
class GenerateService:
    """Serves the `generate` calls of one model.

    Args:
        policy: how to decode.
        family: the model's family.
        seed: one for all rows, one per row, or None to draw one from torch's global generator at
            every call.
        strict: raise instead of running the original.
        layout: what is known about the slots of every call, or None.
        engine: how passes are carried out.
        assume_stateless: as in `GenerateCall`.
        reduction: of the visual tokens of every call.
        layer_methods: what is done to the layers' caches and attention in every call.

    Attributes:
        history: statistics of all calls, the last one at the end.
        warned: reasons for a fallback that the caller was warned of.
        coarse_drafts: those that were opened for the model.
        visuals: what reducers do in the call that runs now, or did in the last one.
    """

    policy: Policy
    family: CausalLM
    seed: int | Sequence[int] | None = None
    strict: bool = False
    layout: Layout | None = None
    engine: Engine = field(default_factory=Engine)
    assume_stateless: bool = False
    history: list[Stats] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)
    coarse_drafts: Opened = field(default_factory=dict)
    reduction: VisualReduction = field(default_factory=VisualReduction)
    layer_methods: LayerMethods = field(default_factory=LayerMethods)

    def __post_init__(self) -> None:
        self.visuals = VisualCall(self.reduction)
        self._one_call = RLock()
        self.series = SeriesOfThreads(self.family.repeats_calls)
        self._fallback = Fallback(
            self.policy, self._next_seed, self.strict, self.layout, self._record, self.warned
        )

    def _next_seed(self) -> int | Sequence[int] | None:
        """The given seed, as it is for the next call."""
        return self.series.present.vary(self.seed)

    def _record(self, stats: Stats) -> None:
        """Keep the statistics of a call; those of a watched series are added up at its end."""
        self.series.present.add(stats)
        if not self.series.present.is_watched:
            self.history.append(stats)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Methods that replace the model's own, by name."""
        others = {name: self._run_other(name, reason) for name, reason in _OTHER_LOOPS.items()}
        own = {"_sample": as_function(self._sample), "generate": as_function(self._generate)}
        batches = {name: self._run_batches(name) for name in _BATCHES}
        return own | others | batches

    def watch_pipeline(self, pipe: Any, *args: Any, **options: Any) -> Any:
        """The call of a pipeline that holds the model: says so where it generated nothing."""
        n_before = len(self.history)
        began = time.perf_counter()
        out = original(pipe, "__call__")(*args, **options)
        if len(self.history) == n_before:
            reason = f"a call of a {type(pipe).__name__} that never called generate of its model"
            self._fallback.warn(reason)
            seconds = time.perf_counter() - began
            self.history.append(Stats(repr(self.policy), fallbacks=[reason], seconds=seconds))
        return out

    def watch_calls(self, holder: Any, *args: Any, **options: Any) -> Any:
        """`generate` of a model that calls the served one many times: one series, with the sums of
        the calls' statistics.
        """
        began = time.perf_counter()
        with self.series.watch() as series:
            try:
                return original(holder, "generate")(*args, **options)
            finally:
                seconds = time.perf_counter() - began
                self.history.append(self._add_up(series.parts, holder, seconds))

    def _add_up(self, parts: Sequence[Stats], holder: Any, seconds: float) -> Stats:
        if not parts:
            reason = f"a call of a {type(holder).__name__} that never called its decoder"
            self._fallback.warn(reason)
            return Stats(repr(self.policy), fallbacks=[reason], seconds=seconds)
        stats = add_stats(parts)
        stats.seed = self.seed
        stats.notes.append(f"{len(parts)} calls of the decoder, {seconds:.2f} s in all")
        return stats

    def serve(self, call: GenerateCall) -> Any:
        """Decode a call of `_sample` by the policy, or run the original where it cannot be served.

        Raises:
            UnsupportedModelError, AttachError: the call cannot be served, and `strict`.
        """
        try:
            facts = self.family.check(call.model)
        except UnsupportedModelError as error:
            if self.strict:
                raise
            reasons = [str(error)]
        else:
            family = self.family
            loop = family.sample_loop(call)
            if loop is not None:
                return self._serve_loop(call, loop)
            reasons = find_obstacles(call, facts, family.takes_own_prompt)
            reasons += self.family.obstacles(call)
            if self.reduction.methods:
                reasons += self.visuals.obstacles(call)
            if self.layer_methods:
                reasons += layer_methods.find_obstacles(self.layer_methods, call)
        if not reasons:
            try:
                return self._decode(call)
            except (
                OptionError
            ) as error:  # a draft model that is too short for the call, and the like
                if self.strict or not _is_untouched(call):
                    raise
                reasons = [str(error)]
            except (AttributeError, ImportError, TypeError) as error:
                if not _can_restart(call):
                    raise
                reasons = [f"{describe_untested(VERSION)}, and {type(error).__name__}: {error}"]
        return self._run_original(call, reasons)

    def _serve_loop(self, call: GenerateCall, loop: Task) -> Any:
        """Decode a task that a family has made of a call, or run the original."""
        if self.layout is not None:
            self._fallback.refuse_layout(_BOOKS)
        if loop.reasons:
            return self._run_original(call, loop.reasons)
        return self._decode_loop(loop)

    def _decode_loop(self, loop: Task) -> Any:
        seed = self._choose_seed(loop.samples)
        self.engine.prepare(loop.model, loop.prompt, self.policy, loop.params)
        noise = Noise.from_seed(seed, loop.prompt.batch, loop.prompt.tokens.device)
        generation = self.policy.sample(
            loop.model, loop.prompt, loop.length, params=loop.params, noise=noise
        )
        generation.stats.seed = seed if loop.samples else self.seed
        self._record(generation.stats)
        return loop.hand_over(generation)

    def _run_original(self, call: GenerateCall, reasons: list[str]) -> Any:
        others = self.visuals.encode_whole(call.model, call.ids, call.others)
        return self._fallback.run(
            call.model,
            "_sample",
            reasons,
            call.ids,
            call.processors,
            call.criteria,
            call.config,
            synced_gpus=call.synced_gpus,
            streamer=call.streamer,
            **others,
        )

    def _sample(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **others: Any,
    ) -> Any:
        call = GenerateCall(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            streamer,
            others,
            self.layout,
            self.assume_stateless,
            self.family.arguments,
            self.family.placeholders(model),
            self.series.present.tokens,
        )
        return self.serve(call)

    def _run_other(self, name: str, reason: str) -> Callable[..., Any]:
        def run(model: Any, *args: Any, **options: Any) -> Any:
            ids = args[0] if args else options["input_ids"]
            options = self.visuals.encode_whole(model, ids, options)
            return self._fallback.run(model, name, [reason], *args, **options)

        return run

    def _run_batches(self, name: str) -> Callable[..., Any]:
        def run(model: Any, *args: Any, **options: Any) -> Any:
            if self.strict:
                self._fallback.refuse(_BATCH)
            if self.layout is not None:
                self._fallback.refuse_layout(_BATCH)
            self._fallback.warn(_BATCH)
            return original(model, name)(*args, **options)

        return run

    def _generate(self, model: Any, *args: Any, **options: Any) -> Any:
        """`generate` itself: decodes a loop of the model's own, and records unknown loops."""
        n_before = self.series.present.n_calls
        if options.get("custom_generate") is not None:
            if self.strict:
                self._fallback.refuse(_CALLERS_LOOP)
            if self.layout is not None:
                self._fallback.refuse_layout(_CALLERS_LOOP)
        loop = self._find_own_loop(model, args, options)
        if loop is not None:
            if self.layout is not None:
                self._fallback.refuse_layout(_MODELS_LOOP)
            if not loop.reasons:
                self._use_coarse_drafts(loop.model, model)
                return self._decode_loop(loop)
            if self.strict:
                self._fallback.refuse("; ".join(loop.reasons))
        began = time.perf_counter()
        inputs = {"input_ids": args[0] if args else options.get("inputs"), **options}
        with self._reducing(model, inputs):
            out = original(model, "generate")(*args, **options)
        if self.series.present.n_calls == n_before:  # `generate` reached no loop of `methods`
            reasons = [_UNKNOWN_LOOP] if loop is None else loop.reasons
            if self.layout is not None:
                self._fallback.refuse_layout(_UNKNOWN_LOOP)
            self._fallback.warn("; ".join(reasons))
            seconds = time.perf_counter() - began
            self._record(Stats(repr(self.policy), fallbacks=reasons, seconds=seconds))
        return out

    @contextmanager
    def _reducing(self, model: Any, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Inside the block, reducers work on a call.

        They put hooks on the model's layers: calls of other threads wait, and one inside a running
        call, in a callback, has an object of its own.
        """
        if not self.reduction.methods:
            yield
            return
        with self._one_call:
            outer = self.visuals
            own = self.visuals = VisualCall(self.reduction)
            try:
                with own.running(model, inputs, self.seed):
                    yield
            finally:
                if outer.given is not None:  # it runs still
                    self.visuals = outer

    def _find_own_loop(
        self, model: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Task | None:
        loop = self.family.own_loop(model, args, options)
        if loop is not None and not loop.reasons:
            try:
                self.family.check(model)
            except UnsupportedModelError as error:
                return Task([str(error)])
        return loop

    def _decode(self, call: GenerateCall) -> Any:
        """Run the policy; return its tokens as `_sample` would."""
        length = call.length
        samples = call.config.do_sample
        assert length is not None  # `find_obstacles` requires a limit
        seed = self._choose_seed(samples)
        whole = call
        cuts = None
        if self.reduction.methods:
            call = self.visuals.apply(whole, _row_seeds(call, seed))
            cuts = self.visuals.cuts
        prompt = self.family.prompt(call)
        kinds, warpers = take_warpers(call.kinds, samples) if call.kinds else ([], {})
        chain = LogitsChain(kinds, whole.ids, prompt.tokens.shape[1]) if kinds else None
        params = call.params({"processor": chain} | warpers)
        window = self.family.open(call)
        self._use_coarse_drafts(window, call.model)
        if self.layer_methods:
            window.use_methods(self.layer_methods, prompt.branches)
        if cuts is not None and cuts.steps is not None:
            window.attention = "model"  # under masks of each step's own
        outputs = _prepare(call, window, self.family, cuts)
        streamer = None
        if call.needs_streamer:
            scores = outputs.scores if outputs is not None and "scores" in call.records else None
            streamer = TokenStreamer(whole.ids, call.criteria, call.streamer, call.pad, scores)

        def on_step(progress: Progress) -> Tensor | None:
            ends = streamer(progress) if streamer is not None else None
            if chain is not None:
                lengths = progress.lengths
                chain.check(progress.previous, lengths if ends is None else lengths.minimum(ends))
            return ends

        chunk_size = call.config.prefill_chunk_size
        self.engine.prepare(window, prompt, self.policy, params, prefill_chunk_size=chunk_size)
        generation = self.policy.sample(
            window,
            prompt,
            length,
            params=params,
            noise=Noise.from_seed(seed, prompt.batch, prompt.tokens.device),
            on_step=None if streamer is None and chain is None else on_step,
        )
        generation.stats.seed = seed if samples else self.seed
        if window.own_prompt is not None and self.engine.prefill_chunk_size and not chunk_size:
            generation.stats.notes.append(
                "prefill_chunk_size: the model's own prefill has processed this prompt whole"
            )
        self._describe_reduction(whole, window, generation.stats)
        self._record(generation.stats)
        self.series.present.tokens = generation.tokens
        if call.streamer is not None:
            call.streamer.end()
        fields = {} if outputs is None else outputs.collect()
        as_output = call.config.return_dict_in_generate
        return hand_over(whole.ids, generation, call.pad, as_output, fields)

    def _describe_reduction(self, call: GenerateCall, window: CausalLMWindow, stats: Stats) -> None:
        """Fill in the statistics what the model computed less of."""
        parts = []
        if self.reduction.methods:
            parts.append(self.visuals.describe())
            self.visuals.record(stats)
            if not call.others.get("mm_encoder_outputs"):
                stats.notes.append("visual_tokens: no image in the prompt, nothing to drop")
        if self.layer_methods:
            self.layer_methods.note(stats, window)
            parts.append(self.layer_methods.describe(window))
        reference = "; ".join(part for part in parts if part)
        if reference:
            stats.exactness = "relaxed"
            stats.reference = reference

    def _use_coarse_drafts(self, window: Any, model: Any) -> None:
        """Coarse drafts of the model's own folder; opened once for all calls."""
        if model.name_or_path and isinstance(window, StateModel):
            use_folder(window, Path(model.name_or_path))
            share_opened(window, self.coarse_drafts)

    def _choose_seed(self, samples: bool) -> int | Sequence[int]:
        if self.seed is not None:
            found = self._next_seed()
            assert found is not None
            return found
        if not samples:  # greedy: leave torch's generator alone
            return 0
        return draw_seed()


def _can_restart(call: GenerateCall) -> bool:
    """Whether the original may serve a call whose decoding failed.

    That is so under a release of transformers that was not tested, whose functions may have
    changed, where the caller has seen nothing of the call yet.
    """
    return describe_untested(VERSION) is not None and _is_untouched(call)


def _is_untouched(call: GenerateCall) -> bool:
    """Whether the caller has seen nothing of the call yet."""
    untouched = call.cache is None or int(call.cache.get_seq_length()) == call.n_cached
    return call.streamer is None and untouched


def _row_seeds(call: GenerateCall, seed: int | Sequence[int]) -> list[int]:
    """One for each row."""
    rows = range(len(call.ids))
    return [seed + row for row in rows] if isinstance(seed, int) else list(seed)


def _prepare(
    call: GenerateCall, window: CausalLMWindow, family: CausalLM, layers: PromptCuts | None
) -> StepOutputs | None:
    """Let a window record what the call wants next to its tokens, and give it its prompt."""
    outputs = None
    names = call.records
    returns_cache = call.returns_cache and family.gives_cache
    if names or returns_cache:
        cache = call.cache if returns_cache else None
        dtype = torch.float32  # which transformers makes of logits, but of guidance's second ones
        if call.guidance is not None:
            dtype = torch.promote_types(dtype, call.model.dtype)
        outputs = StepOutputs(names, Columns(call.mask), call.pad, cache, dtype)
        window.recorder = outputs
        window.pass_options = {n: True for n, kind in PER_LAYER.items() if kind in names}
        if "attentions" in names:
            window.attention = "model"  # the kernel has no weights to give out
    is_own = bool(call.prompt_reasons)
    if not is_own and returns_cache and call.guidance is None and family.takes_own_prompt:
        is_own = not bool(call.mask.all())  # for the keys and values of padding
    if is_own:
        window.own_prompt = open_prompt(call, outputs, layers, window.methods)
    return outputs
