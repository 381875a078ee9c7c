"""The service of `generate`: calls of a transformers model, decoded by a policy.

It replaces `_sample`. The other loops (beam search, assisted decoding) run as before, and the
statistics say so.
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

from mmaccel.capabilities import explain
from mmaccel.contracts import Layout
from mmaccel.errors import AttachError, OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.attach.fallback import run_original
from mmaccel.pipelines.hosts.attach.layer_methods import parts_of
from mmaccel.pipelines.hosts.attach.layout_processor import with_layout
from mmaccel.pipelines.hosts.attach.sample_task import open_task
from mmaccel.pipelines.hosts.attach.series import CallSeries
from mmaccel.pipelines.hosts.attach.service import Methods, Service
from mmaccel.pipelines.hosts.attach.unwrap import is_holder, unwrap
from mmaccel.pipelines.hosts.causal_lm.family import CausalLM
from mmaccel.pipelines.hosts.causal_lm.route import close_forwards
from mmaccel.pipelines.hosts.generate_call import GenerateCall, Task, find_obstacles
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.pipelines.hosts.original_methods import original
from mmaccel.pipelines.hosts.runner.engine import Engine
from mmaccel.pipelines.hosts.transformers_release import VERSION, describe_untested, name_cache
from mmaccel.pipelines.hosts.vision_language.reduction import VisualReduction
from mmaccel.pipelines.hosts.vision_language.visual_call import VisualCall
from mmaccel.policies import Policy
from mmaccel.results import Stats, add_stats
from mmaccel.samplers.drafting.coarse import use_folder
from mmaccel.samplers.drafting.opened import Opened, share_opened
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


@dataclass(frozen=True)
class AttachOptions:
    """What `mmaccel.attach` was given beside the target and the policy."""

    # one for all rows, one per row, or None to draw one from torch's generator at every call
    seed: int | Sequence[int] | None = None
    strict: bool = False
    # of the slots of every call; the original gets it as logits processors, and a loop that takes
    # none is refused
    layout: Layout | None = None
    engine: Engine = field(default_factory=Engine)
    assume_stateless: bool = False
    reduction: VisualReduction = field(default_factory=VisualReduction)
    layer_methods: LayerMethods = field(default_factory=LayerMethods)


@dataclass(eq=False)
class GenerateService(Service):
    """Serves the `generate` calls of one model."""

    policy: Policy
    family: CausalLM
    options: AttachOptions = field(default_factory=AttachOptions)
    target: Any = None
    model: Any = None
    coarse_drafts: Opened = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.series = CallSeries(self.options.reduction)  # of the present thread
        self.visuals = VisualCall(self.options.reduction)  # of the last call that ended
        self._one_call = RLock()

    def methods(self) -> list[tuple[Any, Methods]]:
        replaced = {"_sample": self.sample, "generate": self._generate}
        replaced |= {name: partial(self._run_other, name) for name in _OTHER_LOOPS}
        replaced |= {name: partial(self._run_batches, name) for name in _BATCHES}
        objects: list[tuple[Any, Methods]] = [(self.model, replaced)]
        holder = unwrap(self.target)
        if is_holder(holder):
            objects.append((holder, {"generate": self.watch_calls}))
        return objects

    def kept_tokens(self) -> list[Any]:
        return self.visuals.kept_tokens()

    def reset(self) -> None:
        self.options.engine.close()
        self.series.reset()
        close_forwards(self.model)

    def close(self, *, keep_packed: bool = False) -> None:
        self.options.engine.close()
        if not keep_packed:
            close_forwards(self.model, forget=False)

    def record(self, stats: Stats) -> None:
        """The statistics of a watched series are added up at its end."""
        self.series.n_calls += 1
        (self.history if self.series.parts is None else self.series.parts).append(stats)
        self.warn(stats.fallbacks)

    # ------------------------------------------------------------------ the replaced methods

    def sample(self, model: Any, *args: Any, **options: Any) -> Any:
        """`_sample` by the policy, or by the original where that cannot serve it."""
        arguments = dict(zip(_SAMPLE, args)) | options
        loop: list[Any] = [arguments.get(name) for name in _SAMPLE]
        ids, processors, criteria, config, synced, streamer = loop
        others = {name: value for name, value in arguments.items() if name not in _SAMPLE}
        call = GenerateCall(
            model,
            ids,
            processors,
            criteria,
            config,
            bool(synced),
            streamer,
            others,
            self.options.layout,
            self.options.assume_stateless,
            self.family.arguments,
            self.family.placeholders(model),
            earlier=self.series.tokens,
            window=self.series.window,
        )
        run_original = partial(self._fall_back, model, "_sample", arguments)
        try:  # a model may have changed its mode, or gained an adapter, since the last call
            facts = self.family.check(model)
        except UnsupportedModelError as error:
            if self.options.strict:
                raise
            return run_original([str(error)])
        task = self.family.sample_loop(call)
        if task is not None:
            self._refuse("a model of several codebooks a step")
            return run_original(task.reasons) if task.reasons else self._run(task, model)
        visuals = self.series.visuals
        methods = self.options.layer_methods
        reasons = find_obstacles(call, facts, self.family.takes_own_prompt)
        reasons += self.family.obstacles(call)
        reasons += visuals.obstacles(call)
        reasons += [each.short for each in explain(methods, *parts_of(call))]
        if reasons:
            return run_original(reasons)
        try:
            seed = self._choose_seed(call.config.do_sample)
            return self._run(open_task(call, self.family, visuals, methods, seed), model)
        except OptionError as error:  # a draft model that is too short for the call, and the like
            if self.options.strict or not _is_untouched(call):
                raise
            return run_original([str(error)])
        except (AttributeError, ImportError, TypeError) as error:
            untested = describe_untested(VERSION)  # whose functions may have changed
            if untested is None or not _is_untouched(call):
                raise
            return run_original([f"{untested}, and {type(error).__name__}: {error}"])

    def _generate(self, model: Any, *args: Any, **options: Any) -> Any:
        """`generate` itself: decodes a loop of the model's own, and records unknown loops."""
        generate = original(model, "generate")
        options = name_cache(options, inspect.signature(generate).parameters)
        is_callers_loop = options.get("custom_generate") is not None
        if is_callers_loop:
            self._refuse(_CALLERS_LOOP, [_CALLERS_LOOP])
        reasons = [_UNKNOWN_LOOP]
        task = self.family.own_loop(model, args, options)
        if task is not None:
            reasons = task.reasons
            self._refuse("a decoding loop of the model's own", reasons)
            if not reasons:
                return self._run(task, model)
        inputs = {"input_ids": args[0] if args else options.get("inputs"), **options}
        n_before = self.series.n_calls
        began = time.perf_counter()
        with self._reducing(model, inputs, encodes_whole=is_callers_loop):
            out = generate(*args, **options)
        if self.series.n_calls == n_before:  # `generate` reached no loop of `methods`
            self._refuse(_UNKNOWN_LOOP)
            self._record_fallback(reasons, began)
        return out

    def watch_calls(self, holder: Any, *args: Any, **options: Any) -> Any:
        """`generate` of a model that calls the served one many times: one series, one record."""
        began = time.perf_counter()
        records: list[Stats] = []
        try:
            with self.series.watch() as records:
                return original(holder, "generate")(*args, **options)
        finally:
            if records:
                seconds = time.perf_counter() - began
                stats = add_stats(records)
                stats.seed = self.options.seed
                stats.notes.append(f"{len(records)} calls of the decoder, {seconds:.2f} s in all")
                self.history.append(stats)
            else:
                reason = f"a call of a {type(holder).__name__} that never called its decoder"
                self._record_fallback([reason], began)

    def _run_other(self, name: str, model: Any, *args: Any, **options: Any) -> Any:
        arguments = dict(zip(_SAMPLE, args)) | options
        return self._fall_back(model, name, arguments, [_OTHER_LOOPS[name]])

    def _run_batches(self, name: str, model: Any, *args: Any, **options: Any) -> Any:
        self._refuse(_BATCH, [_BATCH])
        self.warn([_BATCH])
        return original(model, name)(*args, **options)

    @contextmanager
    def _reducing(
        self, model: Any, inputs: Mapping[str, Any], encodes_whole: bool
    ) -> Iterator[None]:
        """Inside the block, reducers work on a call, by hooks on the layers: calls of other threads
        wait, and one inside a running call, in a callback, has an object of its own.
        """
        if not self.options.reduction:
            yield
            return
        with self._one_call:
            outer = self.series.visuals
            visuals = self.series.visuals = VisualCall(self.options.reduction)
            try:
                with visuals.running(model, inputs, self.options.seed, encodes_whole):
                    yield
            finally:
                self.series.visuals = outer
                self.visuals = visuals

    # ------------------------------------------------------------------ what a policy serves

    def _run(self, task: Task, model: Any) -> Any:
        """Decode a task; coarse drafts may lie in the folder of its model."""
        window, prompt, seed = task.model, task.prompt, task.seed
        if seed is None:
            seed = self._choose_seed(task.samples)
        if getattr(model, "name_or_path", ""):
            use_folder(window, Path(model.name_or_path))
            share_opened(window, self.coarse_drafts)  # opened once for all calls
        self.series.window = None  # a call inside of this one has a window of its own
        self.options.engine.prepare(
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
        generation.stats.seed = seed if task.samples else self.options.seed
        self.record(generation.stats)
        self.series.tokens = generation.tokens
        if self.series.parts is not None:
            self.series.window = window
        return task.hand_over(generation)

    def _vary_seed(self) -> int | Sequence[int] | None:
        """The given seed, as it is for the next call of the series."""
        seed = self.options.seed
        if seed is None or not self.family.repeats_calls:
            return seed
        shift = self.series.n_calls * _STEP
        if isinstance(seed, int):
            return (seed + shift) % 2**63
        return [(one + shift) % 2**63 for one in seed]

    def _choose_seed(self, samples: bool) -> int | Sequence[int]:
        seed = self._vary_seed()
        if seed is not None:
            return seed
        return draw_seed() if samples else 0  # greedy: leave torch's generator alone

    # ------------------------------------------------------------------ what no policy serves

    def _refuse(self, loop: str, reasons: Sequence[str] = (), *, is_held: bool = False) -> None:
        """Raise AttachError where the original `loop` would break `strict`, or a layout, unless the
        loop can follow it (`is_held`).
        """
        if self.options.strict and reasons:
            raise AttachError(
                f"generate: expected a call that {type(self.policy).__name__} can serve, received "
                f"{'; '.join(reasons)}; leave that out, or attach with strict=False to run it "
                "without the policy"
            )
        if self.options.layout is not None and not is_held:
            raise AttachError(
                f"generate: expected a call that can be held to a layout, received {loop}; leave "
                "that out, or attach without layout"
            )

    def _fall_back(self, model: Any, name: str, options: dict[str, Any], reasons: list[str]) -> Any:
        """Run one of transformers' own decoding loops; warn once, and record the reasons."""
        self._refuse(name, reasons, is_held=True)
        options = self.series.visuals.encode_whole(model, options)
        layout = self.options.layout
        if layout is not None:
            if getattr(options["generation_config"], "is_assistant", False):
                self._refuse("a model that drafts for another one")
            n_prompt = options["input_ids"].shape[1]
            processors = options["logits_processor"]
            options["logits_processor"] = with_layout(processors, layout, n_prompt)
        self.warn(reasons)
        out, stats = run_original(model, name, options, self._vary_seed())
        stats.policy, stats.fallbacks = repr(self.policy), list(reasons)
        self.record(stats)
        return out

    def _record_fallback(self, reasons: list[str], began: float) -> None:
        seconds = time.perf_counter() - began
        self.record(Stats(repr(self.policy), fallbacks=list(reasons), seconds=seconds))


def _is_untouched(call: GenerateCall) -> bool:
    """Whether the caller has seen nothing of the call yet."""
    untouched = call.cache is None or int(call.cache.get_seq_length()) == call.n_cached
    return call.streamer is None and untouched
