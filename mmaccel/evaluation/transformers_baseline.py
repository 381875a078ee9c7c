"""Baselines: the same images or texts by transformers' own `generate`, as others decode them.

`transformers` is the call as it is; `static` gives it a cache of fixed size; `compiled` also
compiles the pass of one token (`torch.compile`), as its authors recommend for speed;
`prompt-lookup` drafts, one sequence after another, since assisted decoding takes one. The draw
alone is ours: a logits processor of the sampling parameters and the plain loop's frozen noise
leaves one token, so that all sides make the same tokens and none is faster by drawing less.

Guidance runs as rows of the same pass, which is faster than transformers' own second call. Prompts
are padded to the longest of the report, so that shapes never change.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmaccel.contracts import Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.evaluation.texts import ContinuedTexts
from mmaccel.pipelines.hosts.attach.fallback import count_passes
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.runner import compiled_passes
from mmaccel.pipelines.models.scenes import WordImages
from mmaccel.pipelines.text_to_image.outputs import ImageOutput
from mmaccel.results import Stats, add_stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.run_lock import alone
from mmaccel.samplers.sampling_params import SamplingParams

_TRIED = 3  # tokens: the prompt's pass, and two that would be compiled
BASELINES = ("transformers", "static", "compiled", "prompt-lookup")
_COMPILED, _DRAFTED = "compiled", "prompt-lookup"
_STATIC = ("static", _COMPILED)
_LOOKUP = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}
BACKEND = "inductor"  # of torch.compile


class BaselineDecoding:
    """`stream` as `TextToImage` has it, by transformers' `generate`, for a pipeline that passes
    `find_obstacle`, and all captions that will be asked for.
    """

    def __init__(self, pipe: Any, name: str, captions: Sequence[str]) -> None:
        self.pipe, self.name, self.model = pipe, name, pipe.model
        self._longest = max(len(pipe.image_model.encode(caption)) for caption in captions)
        self._before = set(vars(self.model.model))
        self._size = 0

    def stream(
        self,
        captions: Sequence[str],
        params: SamplingParams,
        *,
        policy: None = None,
        seed: Sequence[int],
        batch_size: int,
    ) -> Iterator[ImageOutput]:
        """Batch after batch, as they are finished; `generate` is the policy, and the parameters are
        without a processor."""
        for first in range(0, len(captions), batch_size):
            texts, seeds = captions[first : first + batch_size], seed[first : first + batch_size]
            tokens, stats = self.decode(texts, params, seeds, self.pipe.length)
            began = time.perf_counter()
            images = self.pipe.image_model.render(tokens, texts, list(seeds))
            stats.pixel_seconds = time.perf_counter() - began
            passes = torch.full((len(texts),), stats.passes, dtype=torch.int64)
            yield ImageOutput(images, tokens.cpu(), passes, stats, list(texts))

    @torch.no_grad()
    def decode(
        self, captions: Sequence[str], params: SamplingParams, seeds: Sequence[int], length: int
    ) -> tuple[Tensor, Stats]:
        """Tokens `[B, length]` int64, and what they cost."""
        from transformers import GenerationConfig, LogitsProcessorList

        if self.name == _DRAFTED and len(captions) > 1:
            parts = [self.decode([c], params, [k], length) for c, k in zip(captions, seeds)]
            return torch.cat([part[0] for part in parts]), add_stats([part[1] for part in parts])
        if self.name == _COMPILED and self._size != len(captions):
            self.close()  # every size has graphs of its own, as if it were the only one
            self._size = len(captions)
        images, before, began = self.pipe.image_model, _count_graphs(), time.perf_counter()
        ids = [images.encode(caption) for caption in captions]
        prompt = images.prompt(ids, params.guidance_scale != 1)
        rows, mask = self._align(prompt)
        noise = Noise.from_seed(seeds, len(captions), self.model.device)
        longest = rows.shape[1]
        is_drafted = self.name == _DRAFTED
        draw = _Draw(prompt, params, noise, self.model.vocab_size, longest, is_drafted)
        config = GenerationConfig(
            max_new_tokens=length, do_sample=False, pad_token_id=0, **self._how()
        )
        with alone(self.model), count_passes(self.model.model) as counter:
            generated: Any = self.model.model.generate(
                rows,
                attention_mask=mask,
                logits_processor=LogitsProcessorList([draw]),
                generation_config=config,
            )
        if self.name == _COMPILED and "_compiled_call" not in vars(self.model.model):
            raise UnsupportedModelError(
                "compiled: expected transformers to compile its pass of one token, which it did "
                "not; its version may not do so on this device"
            )
        tokens = generated[: len(captions), longest : longest + length]
        tokens = F.pad(tokens, (0, length - tokens.shape[1]))  # where all have ended early
        seconds = time.perf_counter() - began
        lengths = _find_lengths(tokens, prompt.stop_tokens)
        n_tokens = int(lengths.sum())
        return tokens, Stats(
            policy=self.name,
            tokens=n_tokens,
            passes=counter.passes,
            row_passes=int(lengths.clamp(max=counter.passes).sum()),
            seconds=seconds,
            branches=prompt.branches,
            accepted=[] if is_drafted else [n_tokens],  # drafts: not counted by slot
            forward_seconds=seconds - draw.seconds,
            captures=_count_graphs() - before,
        )

    def close(self) -> None:
        """Forget what was compiled, and leave nothing on the model."""
        model = self.model.model
        for name in set(vars(model)) - self._before:
            delattr(model, name)
        if self.name == _COMPILED:
            torch._dynamo.reset()

    def _how(self) -> dict[str, Any]:
        how: dict[str, Any] = {"disable_compile": self.name != _COMPILED}
        if self.name in _STATIC:
            how["cache_implementation"] = "static"
        if self.name == _DRAFTED:
            how |= _LOOKUP
        if self.name == _COMPILED:
            from transformers.generation import CompileConfig

            mode = "default" if self.model.device.type == "cpu" else "reduce-overhead"
            how["compile_config"] = CompileConfig(backend=BACKEND, dynamic=False, mode=mode)
            how["compile_config"]._compile_all_devices = True  # a processor too
        return how

    def _align(self, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Prompts `[R, T]` int64 padded on the left, as `generate` wants them, and their mask."""
        longest = int(prompt.lengths.max())
        if self.name in _STATIC:
            longest = max(longest, self._longest)
        places = torch.arange(longest, device=prompt.tokens.device) - longest
        places = places + prompt.lengths[:, None]  # [R, T], in the row; below 0 is padding
        rows = prompt.tokens.gather(1, places.clamp(0, prompt.tokens.shape[1] - 1))
        return rows, (places >= 0).long()


@dataclass
class _Draw:
    """A logits processor that leaves the token that the plain loop draws.

    The slot is the ids' length: assisted decoding draws for several of a pass, and some again.
    """

    prompt: Prompt
    params: SamplingParams
    noise: Noise
    vocab_size: int
    longest: int
    is_drafted: bool
    seconds: float = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.is_drafted and bool((scores == 1).all()):  # asks which drafts may be tried
            return scores
        began, branches = time.perf_counter(), self.prompt.branches
        slot = input_ids.shape[1] - self.longest
        slots = input_ids.new_full((len(scores) // branches, 1), slot)
        target = self.params.apply(
            scores[:, None, : self.vocab_size],
            branches,
            slots[:, :0],
            slots,
            slots,
            self.prompt.layout,
        )
        noise = self.noise.frozen(slots, self.vocab_size, self.params.temperature)
        tokens = (target + noise)[:, 0].argmax(-1).repeat(branches)  # [R]
        alone_in_row = torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)
        self.seconds += time.perf_counter() - began
        return alone_in_row


def _find_lengths(tokens: Tensor, stops: Tensor | None) -> Tensor:
    """Tokens of each row `[B]` of `[B, L]`, up to its first stop."""
    lengths = tokens.new_full((len(tokens),), tokens.shape[1])
    if stops is None:
        return lengths
    is_stop = torch.isin(tokens, stops)
    return torch.where(is_stop.any(1), is_stop.int().argmax(1) + 1, lengths)


def _count_graphs() -> int:
    """Graphs that torch has compiled so far, in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def find_obstacle(pipe: Any, name: str, caption: str, params: SamplingParams) -> str:
    """Why a baseline cannot run; empty where it can. A few tokens are made to find out."""
    images = pipe.image_model
    if (
        not isinstance(images, WordImages | ContinuedTexts)
        or type(pipe.model) is not CausalLMWindow
    ):
        return f"transformers' generate makes no images of {type(images).__name__} by itself"
    if params.processor is not None:
        return "the model's filters have a processor, which generate would not be given"
    if name == _COMPILED:
        device = pipe.model.device
        reason = compiled_passes.find_obstacle() if device.type == "cpu" else ""
        reason = reason or _try(lambda: _compile(device))
        if reason:
            return f"torch.compile does not work here ({reason})"
    if name == _DRAFTED and params.guidance_scale != 1:
        return (
            "transformers' assisted decoding takes one sequence, and guidance is two; its own "
            "guidance processor beside assisted decoding makes other tokens than without"
        )
    decoding = BaselineDecoding(pipe, "static" if name == "compiled" else name, [caption])
    try:
        reason = _try(lambda: decoding.decode([caption], params, [0], _TRIED))
    finally:
        decoding.close()
    return reason and f"transformers' generate does not run so ({reason})"


def _compile(device: torch.device) -> None:
    program = torch.compile(lambda x: x * 2 + 1, backend=BACKEND, dynamic=False)
    program(torch.ones(5, device=device, dtype=torch.float32))


def _try(call: Any) -> str:
    """What a call failed with, in a line; empty where it did not."""
    try:
        call()
    except Exception as error:  # compilers raise what they like
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""
