"""The service of `generate`: calls of a transformers model, decoded by a policy.

`generate` looks its loops up on the model's class. The policy takes the place of `_sample`; the
other loops (beams, assistants) are only watched, so that what they do stands in the statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmaccel.contracts import Layout, Policy
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.attach.fallback import Fallback
from mmaccel.pipelines.attach.generate_call import GenerateCall, OwnLoop, find_obstacles, hand_over
from mmaccel.pipelines.attach.patching import original
from mmaccel.pipelines.attach.streaming import TokenStreamer
from mmaccel.pipelines.causal_lm.family import CausalLM
from mmaccel.pipelines.logits.processor_chain import LogitsChain, take_warpers
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.results import Progress, Stats
from mmaccel.samplers.noise import Noise

_UNKNOWN = "a decoding loop that is not transformers' own"
_CALLERS = "custom_generate, a decoding loop of the caller's own"
_MODELS = "a decoding loop of the model's own"
_WATCHED = {"_beam_search": "beam search", "_assisted_decoding": "assisted decoding"}


@dataclass
class GenerateService:
    """Serves the `generate` calls of one model.

    Args:
        policy: how to decode.
        family: what the model is.
        seed: one for all rows, one per row, or None to draw one from torch's global generator at
            every call.
        strict: raise instead of running the original.
        layout: what is known about the slots of every call, or None.
        engine: how passes are carried out.
        assume_stateless: as in `GenerateCall`.

    Attributes:
        history: statistics of all calls, the last one at the end.
    """

    policy: Policy
    family: CausalLM
    seed: int | Sequence[int] | None = None
    strict: bool = False
    history: list[Stats] = field(default_factory=list)
    _warned: set[str] = field(default_factory=set)
    layout: Layout | None = None
    engine: Engine = field(default_factory=Engine)
    assume_stateless: bool = False

    def __post_init__(self) -> None:
        self._fallback = Fallback(
            self.policy, self.seed, self.strict, self.layout, self.history, self._warned
        )

    def methods(self) -> dict[str, Callable[..., Any]]:
        """What to put in the place of the model's own methods."""

        def sample(
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
                model, input_ids, logits_processor, stopping_criteria, generation_config,
                synced_gpus, streamer, others, self.layout, self.assume_stateless,
            )  # fmt: skip
            return self.serve(call)

        def watch(name: str, words: str) -> Callable[..., Any]:
            return lambda model, *args, **options: self._fallback.run(
                model, name, [words], *args, **options
            )

        def generate(model: Any, *args: Any, **options: Any) -> Any:
            noted, own = len(self.history), options.get("custom_generate")
            if own is not None and self.strict:
                self._fallback.refuse(_CALLERS)
            if own is not None and self.layout is not None:
                self._fallback.refuse_layout(_CALLERS)
            loop = self._find_own_loop(model, args, options)
            if loop is not None and self.layout is not None:
                self._fallback.refuse_layout(_MODELS)
            if loop is not None and not loop.reasons:
                out, stats = loop.decode(self.policy, self._choose_seed(loop.samples), self.engine)
                self.history.append(stats)
                return out
            if loop is not None and self.strict:
                self._fallback.refuse("; ".join(loop.reasons))
            began = time.perf_counter()
            out = original(model, "generate")(*args, **options)
            if len(self.history) == noted:  # no loop that is replaced or watched was reached
                reasons = loop.reasons if loop is not None else [_UNKNOWN]
                if self.layout is not None:
                    self._fallback.refuse_layout(_UNKNOWN)
                self._fallback.warn("; ".join(reasons))
                seconds = time.perf_counter() - began
                self.history.append(Stats(repr(self.policy), fallbacks=reasons, seconds=seconds))
            return out

        return {"_sample": sample, "generate": generate} | {
            name: watch(name, words) for name, words in _WATCHED.items()
        }

    def serve(self, call: GenerateCall) -> Any:
        """Decode a call, or run the original where that cannot be."""
        try:
            self.family.check(call.model)
        except UnsupportedModelError as error:
            if self.strict:
                raise
            reasons = [str(error)]
        else:
            own = self.family.obstacles(call)
            reasons = [*find_obstacles(call, self.family.served), *own]
        if not reasons:
            return self._decode(call)
        return self._fallback.run(
            call.model, "_sample", reasons, call.ids, call.processors, call.criteria,
            call.config, synced_gpus=call.synced_gpus, streamer=call.streamer, **call.others,
        )  # fmt: skip

    def _find_own_loop(
        self, model: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> OwnLoop | None:
        loop = self.family.own_loop(model, args, options)
        if loop is not None and not loop.reasons:
            try:
                self.family.check(model)
            except UnsupportedModelError as error:
                return OwnLoop([str(error)])
        return loop

    def _decode(self, call: GenerateCall) -> Any:
        """Run the policy and hand its tokens over as `_sample` would."""
        prompt, length = call.prompt(), call.length
        assert length is not None  # else an obstacle
        kinds, warpers = take_warpers(call.kinds(), call.config.do_sample)
        chain = LogitsChain(kinds, call.ids, prompt.tokens.shape[1]) if kinds else None
        params = call.params({"processor": chain} | warpers)
        feed = None
        if call.needs_feed:
            feed = TokenStreamer(call.ids, call.criteria, call.streamer, call.pad)

        def on_step(progress: Progress) -> Tensor | None:
            ends = feed(progress) if feed is not None else None
            if chain is not None:
                made = progress.lengths
                chain.check(progress.previous, made if ends is None else made.minimum(ends))
            return ends

        window, seed = self.family.open(call), self._choose_seed(call.config.do_sample)
        self.engine.prepare(window, prompt, self.policy, params)
        noise = Noise.from_seed(seed, prompt.batch, prompt.tokens.device)
        told = on_step if feed is not None or chain is not None else None
        given: dict[str, Any] = {"params": params, "noise": noise, "on_step": told}
        made = self.policy.sample(window, prompt, length, **given)
        self.history.append(made.stats)
        if call.streamer is not None:
            call.streamer.end()
        return hand_over(call.ids, made, call.pad, call.config.return_dict_in_generate)

    def _choose_seed(self, samples: bool) -> int | Sequence[int]:
        if self.seed is not None:
            return self.seed
        if not samples:  # greedy: leave torch's generator alone
            return 0
        return int(torch.randint(2**63 - 1, ()))
