"""The service of `generate`: calls of a transformers model, decoded by a policy.

`generate` looks its decoding loops up on the model's class. The policy replaces `_sample`. The
other loops (beam search, assisted decoding) run as before, and the statistics say so.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from mmaccel.capabilities import explain
from mmaccel.contracts import Layout
from mmaccel.errors import AttachError, OptionError, UnsupportedModelError
from mmaccel.pipelines.attach.fallback import run_original
from mmaccel.pipelines.attach.layer_methods import parts_of
from mmaccel.pipelines.attach.layout_processor import with_layout
from mmaccel.pipelines.attach.prompt_pass import open_prompt
from mmaccel.pipelines.attach.series import CallSeries
from mmaccel.pipelines.attach.service import Methods, Service
from mmaccel.pipelines.attach.step_outputs import StepOutputs
from mmaccel.pipelines.attach.streaming import TokenStreamer
from mmaccel.pipelines.attach.unwrap import is_holder, is_pipeline, unwrap
from mmaccel.pipelines.causal_lm.family import CausalLM
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.causal_lm.route import close_forwards
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
from mmaccel.pipelines.prompt_cuts.layers import PromptCuts
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.pipelines.transformers_release import VERSION, describe_untested, name_cache
from mmaccel.pipelines.vision_language.reduction import VisualReduction
from mmaccel.pipelines.vision_language.visual_call import VisualCall
from mmaccel.policies import Policy
from mmaccel.results import Generation, Progress, Stats, add_stats
from mmaccel.samplers.drafting.coarse import Opened, share_opened, use_folder
from mmaccel.samplers.drafting.states import StateModel
from mmaccel.samplers.noise import Noise, draw_seed

_UNKNOWN_LOOP = "a decoding loop that is not transformers' own"
_CALLERS_LOOP = "custom_generate, a decoding loop of the caller's own"
_BATCH = "transformers' own continuous batching; generate takes a padded batch"
_BATCHES = ("generate_batch", "init_continuous_batching")
_OTHER_LOOPS = {"_beam_search": "beam search", "_assisted_decoding": "assisted decoding"}
_SAMPLE = (  # arguments of transformers' loops by position
    "input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus",
    "streamer",
)  # fmt: skip
_STEP = 0x9E3779B97F4A7C15  # odd: the seeds of 2**63 calls of a series differ


@dataclass(eq=False)
class GenerateService(Service):
    """Serves the `generate` calls of one model.

    Args:
        policy: how to decode.
        family: the model's family.
        seed: one for all rows, one per row, or None to draw one from torch's global generator at
            every call.
        strict: raise instead of running the original.
        layout: what is known about the slots of every call, or None. The original gets it as logits
            processors; a loop that takes none is refused.
        engine: how passes are carried out.
        assume_stateless: as in `GenerateCall`.
        target: what was given to `attach`; None where nothing is attached.
        model: the model in it.
        coarse_drafts: those that were opened for the model.
        reduction: of the prompt of every call.
        layer_methods: what is done to the layers' caches and attention in every call.

    Attributes:
        series: of the present thread: what its calls have made, and the one that runs.
        visuals: what reducers did in the last call that ended.
    """

    policy: Policy
    family: CausalLM
    seed: int | Sequence[int] | None = None
    strict: bool = False
    layout: Layout | None = None
    engine: Engine = field(default_factory=Engine)
    assume_stateless: bool = False
    target: Any = None
    model: Any = None
    coarse_drafts: Opened = field(default_factory=dict)
    reduction: VisualReduction = field(default_factory=VisualReduction)
    layer_methods: LayerMethods = field(default_factory=LayerMethods)

    def __post_init__(self) -> None:
        self.series = CallSeries(self.reduction)
        self.visuals = VisualCall(self.reduction)
        self._one_call = RLock()

    def methods(self) -> list[tuple[Any, Methods]]:
        own = {"_sample": self.sample, "generate": self._generate}
        own |= {name: partial(self._run_other, name) for name in _OTHER_LOOPS}
        own |= {name: partial(self._run_batches, name) for name in _BATCHES}
        found: list[tuple[Any, Methods]] = [(self.model, own)]
        if is_pipeline(self.target, "diffusers"):
            found.append((self.target, {"__call__": self.watch_pipeline}))
        holder = unwrap(self.target)
        if is_holder(holder):
            found.append((holder, {"generate": self.watch_calls}))
        return found

    def kept_tokens(self) -> list[Any]:
        return self.visuals.kept_tokens()

    def reset(self) -> None:
        self.engine.close()
        self.series.reset()
        close_forwards(self.model)

    def close(self, *, keep_packed: bool = False) -> None:
        self.engine.close()
        if not keep_packed:
            close_forwards(self.model, forget=False)

    def record(self, stats: Stats) -> None:
        """See `Service`; the statistics of a watched series are added up at its end."""
        self.series.n_calls += 1
        (self.history if self.series.parts is None else self.series.parts).append(stats)
        self.warn(stats.fallbacks)

    def watch_pipeline(self, pipe: Any, *args: Any, **options: Any) -> Any:
        """The call of a pipeline that holds the model: says so where it generated nothing."""
        n_before = len(self.history)
        began = time.perf_counter()
        out = original(pipe, "__call__")(*args, **options)
        if len(self.history) == n_before:
            reason = f"a call of a {type(pipe).__name__} that never called generate of its model"
            self._record_fallback([reason], began)
        return out

    def watch_calls(self, holder: Any, *args: Any, **options: Any) -> Any:
        """`generate` of a model that calls the served one many times: one series, with the sums of
        the calls' statistics.
        """
        began = time.perf_counter()
        parts: list[Stats] = []
        try:
            with self.series.watch() as parts:
                return original(holder, "generate")(*args, **options)
        finally:
            if parts:
                seconds = time.perf_counter() - began
                stats = add_stats(parts)
                stats.seed = self.seed
                stats.notes.append(f"{len(parts)} calls of the decoder, {seconds:.2f} s in all")
                self.history.append(stats)
            else:
                reason = f"a call of a {type(holder).__name__} that never called its decoder"
                self._record_fallback([reason], began)

    def sample(
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
        """`_sample` by the policy, or by the original where that cannot serve it.

        Raises:
            UnsupportedModelError, AttachError: the call cannot be served, and `strict`.
        """
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
            self.series.tokens,
        )
        loop = (call.ids, logits_processor, stopping_criteria, generation_config)
        given = dict(zip(_SAMPLE, (*loop, synced_gpus, streamer))) | others
        run_original = partial(self._fall_back, model, "_sample", given)
        try:
            facts = self.family.check(model)
        except UnsupportedModelError as error:
            if self.strict:
                raise
            return run_original([str(error)])
        task = self.family.sample_loop(call)
        if task is not None:
            self._refuse("a model of several codebooks a step")
            return run_original(task.reasons) if task.reasons else self._run(task)
        reasons = find_obstacles(call, facts, self.family.takes_own_prompt)
        reasons += self.family.obstacles(call)
        reasons += self.series.visuals.obstacles(call)
        asked = parts_of(call)
        reasons += [each.short for each in explain(self.layer_methods, *asked)]
        if reasons:
            return run_original(reasons)
        try:
            return self._decode(call)
        except OptionError as error:  # a draft model that is too short for the call, and the like
            if self.strict or not _is_untouched(call):
                raise
            return run_original([str(error)])
        except (AttributeError, ImportError, TypeError) as error:
            untested = describe_untested(VERSION)  # whose functions may have changed
            if untested is None or not _is_untouched(call):
                raise
            return run_original([f"{untested}, and {type(error).__name__}: {error}"])

    def _generate(self, model: Any, *args: Any, **options: Any) -> Any:
        """`generate` itself: decodes a loop of the model's own, and records unknown loops."""
        n_before = self.series.n_calls
        generate = original(model, "generate")
        options = name_cache(options, inspect.signature(generate).parameters)
        if options.get("custom_generate") is not None:
            self._refuse(_CALLERS_LOOP, [_CALLERS_LOOP])
        task = self.family.own_loop(model, args, options)
        if task is not None:
            self._refuse("a decoding loop of the model's own", task.reasons)
            if not task.reasons:
                return self._run(task, model)
        began = time.perf_counter()
        inputs = {"input_ids": args[0] if args else options.get("inputs"), **options}
        with self._reducing(model, inputs):
            out = generate(*args, **options)
        if self.series.n_calls == n_before:  # `generate` reached no loop of `methods`
            self._refuse(_UNKNOWN_LOOP)
            self._record_fallback([_UNKNOWN_LOOP] if task is None else task.reasons, began)
        return out

    @contextmanager
    def _reducing(self, model: Any, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Inside the block, reducers work on a call.

        They put hooks on the model's layers: calls of other threads wait, and one inside a running
        call, in a callback, has an object of its own.
        """
        if not self.reduction:
            yield
            return
        with self._one_call:
            outer = self.series.visuals
            own = self.series.visuals = VisualCall(self.reduction)
            try:
                with own.running(model, inputs, self.seed):
                    yield
            finally:
                self.series.visuals = outer
                self.visuals = own

    # ------------------------------------------------------------------ what no policy serves

    def _refuse(self, loop: str, reasons: Sequence[str] = (), *, is_held: bool = False) -> None:
        """Refuse a call that the original would have to run.

        Args:
            loop: that would run it.
            reasons: why no policy can.
            is_held: whether the loop can follow a layout.

        Raises:
            AttachError: there are reasons, and `strict`, or there is a layout.
        """
        if self.strict and reasons:
            raise AttachError(
                f"generate: expected a call that {type(self.policy).__name__} can serve, received "
                f"{'; '.join(reasons)}; leave that out, or attach with strict=False to run it "
                "without the policy"
            )
        if self.layout is not None and not is_held:
            raise AttachError(
                f"generate: expected a call that can be held to a layout, received {loop}; leave "
                "that out, or attach without layout"
            )

    def _run_other(self, name: str, model: Any, *args: Any, **options: Any) -> Any:
        given = dict(zip(_SAMPLE, args)) | options
        return self._fall_back(model, name, given, [_OTHER_LOOPS[name]])

    def _run_batches(self, name: str, model: Any, *args: Any, **options: Any) -> Any:
        self._refuse(_BATCH, [_BATCH])
        self.warn([_BATCH])
        return original(model, name)(*args, **options)

    def _fall_back(self, model: Any, name: str, options: dict[str, Any], reasons: list[str]) -> Any:
        """Run one of transformers' own decoding loops; warn once, and record the reasons."""
        self._refuse(name, reasons, is_held=True)
        options = self.series.visuals.encode_whole(model, options)
        if self.layout is not None:
            if getattr(options["generation_config"], "is_assistant", False):
                self._refuse("a model that drafts for another one")
            n_prompt = options["input_ids"].shape[1]
            given = options["logits_processor"]
            options["logits_processor"] = with_layout(given, self.layout, n_prompt)
        self.warn(reasons)
        out, stats = run_original(model, name, options, self._vary_seed())
        stats.policy, stats.fallbacks = repr(self.policy), list(reasons)
        self.record(stats)
        return out

    def _record_fallback(self, reasons: list[str], began: float) -> None:
        """Record a call that no loop of ours has seen."""
        seconds = time.perf_counter() - began
        self.record(Stats(repr(self.policy), fallbacks=list(reasons), seconds=seconds))

    # ------------------------------------------------------------------ what a policy serves

    def _run(self, task: Task, model: Any = None) -> Any:
        """Decode a task; coarse drafts may lie in the folder of a model."""
        window = task.model
        prompt = task.prompt
        seed = self._choose_seed(task.samples) if task.seed is None else task.seed
        if getattr(model, "name_or_path", "") and isinstance(window, StateModel):
            use_folder(window, Path(model.name_or_path))
            share_opened(window, self.coarse_drafts)  # opened once for all calls
        self.engine.prepare(
            window, prompt, self.policy, task.params, prefill_chunk_size=task.prefill_chunk_size
        )
        generation = self.policy.sample(
            window,
            prompt,
            task.length,
            params=task.params,
            noise=Noise.from_seed(seed, prompt.batch, prompt.tokens.device),
            on_step=task.on_step,
        )
        generation.stats.seed = seed if task.samples else self.seed
        self.record(generation.stats)
        return task.hand_over(generation)

    def _decode(self, call: GenerateCall) -> Any:
        """Run the policy; return its tokens as `_sample` would."""
        samples = call.config.do_sample
        chunk_size = call.config.prefill_chunk_size
        assert call.length is not None  # `find_obstacles` requires a limit
        seed = self._choose_seed(samples)
        rows = range(len(call.ids))
        seeds = [seed + row for row in rows] if isinstance(seed, int) else list(seed)
        own = self.series.visuals.apply(call, seeds)
        cuts = self.series.visuals.cuts
        prompt = self.family.prompt(own)
        kinds, warpers = take_warpers(own.kinds, samples)
        chain = LogitsChain(kinds, call.ids, prompt.tokens.shape[1]) if kinds else None
        window = self.family.open(own)
        if self.layer_methods:
            window.use_methods(self.layer_methods, prompt.branches)
        if cuts is not None and cuts.steps is not None:
            window.attention = "model"  # under masks of each step's own
        outputs = _prepare(own, window, self.family, cuts)
        streamer = None
        if own.needs_streamer:
            scores = outputs.scores if outputs is not None and "scores" in own.records else None
            streamer = TokenStreamer(call.ids, call.criteria, call.streamer, call.pad, scores)

        def on_step(progress: Progress) -> Tensor | None:
            ends = streamer(progress) if streamer is not None else None
            if chain is not None:
                lengths = progress.lengths
                chain.check(progress.previous, lengths if ends is None else lengths.minimum(ends))
            return ends

        def hand_on(made: Generation) -> Any:
            whole = "" if window.own_prompt is None else window.lack("own chunks")
            if whole and window.setup.prefill_chunk_size is not None:
                made.stats.notes.append(
                    f"prefill_chunk_size: this prompt was processed whole: {whole}"
                )
            self._describe_reduction(call, window, made.stats)
            self.series.tokens = made.tokens
            if call.streamer is not None:
                call.streamer.end()
            fields = {} if outputs is None else outputs.collect()
            if call.records & self.family.of_tokens:
                fields |= self.family.make_steps(call.model, made.tokens)
            return hand_over(call.ids, made, call.pad, call.config.return_dict_in_generate, fields)

        task = Task(
            model=window,
            prompt=prompt,
            length=call.length,
            params=own.params({"processor": chain} | warpers),
            samples=samples,
            seed=seed,
            on_step=None if streamer is None and chain is None else on_step,
            prefill_chunk_size=chunk_size,
            hand_over=hand_on,
        )
        return self._run(task, call.model)

    def _describe_reduction(self, call: GenerateCall, window: CausalLMWindow, stats: Stats) -> None:
        """Fill in the statistics what the model computed less of."""
        parts = [self.series.visuals.describe()]
        self.series.visuals.record(stats)
        if self.reduction.methods and not call.others.get("mm_encoder_outputs"):
            stats.notes.append("visual_tokens: no image in the prompt, nothing to drop")
        if self.layer_methods:
            self.layer_methods.note(stats, window)
            parts.append(self.layer_methods.describe(window))
        reference = "; ".join(filter(None, parts))
        if reference:
            stats.exactness = "relaxed"
            stats.reference = reference

    def _vary_seed(self) -> int | Sequence[int] | None:
        """The given seed, as it is for the next call of the series."""
        if self.seed is None or not self.family.repeats_calls:
            return self.seed
        shift = self.series.n_calls * _STEP
        if isinstance(self.seed, int):
            return (self.seed + shift) % 2**63
        return [(one + shift) % 2**63 for one in self.seed]

    def _choose_seed(self, samples: bool) -> int | Sequence[int]:
        seed = self._vary_seed()
        if seed is not None:
            return seed
        return draw_seed() if samples else 0  # greedy: leave torch's generator alone


def _is_untouched(call: GenerateCall) -> bool:
    """Whether the caller has seen nothing of the call yet."""
    untouched = call.cache is None or int(call.cache.get_seq_length()) == call.n_cached
    return call.streamer is None and untouched


def _prepare(
    call: GenerateCall, window: CausalLMWindow, family: CausalLM, layers: PromptCuts | None
) -> StepOutputs | None:
    """Let a window record what the call wants next to its tokens, and give it its prompt."""
    outputs = None
    names = call.records - family.of_tokens
    returns_cache = call.returns_cache and family.gives_cache
    if names or returns_cache:
        cache = call.cache if returns_cache else None
        dtype = torch.float32  # which transformers makes of logits, but of guidance's second ones
        if call.guidance is not None:
            dtype = torch.promote_types(dtype, call.model.dtype)
        outputs = StepOutputs(names, call.mask, call.pad, cache, dtype)
        window.setup.recorder = outputs
        window.pass_options = {n: True for n, kind in PER_LAYER.items() if kind in names}
        if "attentions" in names:
            window.attention = "model"  # the kernel has no weights to give out
    is_own = bool(call.prompt_reasons) or layers is not None
    if not is_own and returns_cache and call.guidance is None and family.takes_own_prompt:
        is_own = not bool(call.mask.all())  # for the keys and values of padding
    if is_own:
        window.own_prompt = open_prompt(call, outputs, layers, window.methods)
    return outputs
