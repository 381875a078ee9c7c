"""One `generate` call, read as a decoding task: prompt, length, sampling parameters, stops.

`GenerateCall` reads a call of transformers' `_sample`, `OwnLoop` a loop of the model's own.
`find_obstacles` names what a policy cannot serve, in words that go into the statistics.

Source: `transformers.generation.utils.GenerationMixin.generate` and `_sample`, 5.17 to 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import Layout, Policy, Prompt, TokenModel
from mmaccel.pipelines.causal_lm.compatibility import find_training_effect, text_config
from mmaccel.pipelines.logits.processor_chain import LogGuidance
from mmaccel.pipelines.logits.processor_support import find_kind, is_own
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.results import Generation, Stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

GUIDANCE = "UnbatchedClassifierFreeGuidanceLogitsProcessor"


@dataclass
class GenerateCall:
    """Arguments of one `_sample` call.

    Attributes:
        model: the model.
        ids: `[B, T]` int64, padded on the left.
        processors: transformers' `LogitsProcessorList`.
        criteria: transformers' `StoppingCriteriaList`.
        config: transformers' `GenerationConfig`.
        synced_gpus: as in `_sample`.
        streamer: as in `_sample`.
        others: all arguments for the model's forward.
        layout: what is known about the tokens of each slot, or None.
        assume_stateless: whether processors of the caller's own count as marked, see
            `mmaccel.stateless`.
    """

    model: Any
    ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    synced_gpus: bool = False
    streamer: Any = None
    others: dict[str, Any] = field(default_factory=dict)
    layout: Layout | None = None
    assume_stateless: bool = False

    @property
    def guidance(self) -> Any:
        """The guidance processor, if it comes first."""
        first = self.processors[0] if self.processors else None
        return first if is_own(first, GUIDANCE) else None

    @property
    def mask(self) -> Tensor:
        """`[B, T]` bool, False on padding."""
        mask = self.others.get("attention_mask")
        return torch.ones_like(self.ids, dtype=torch.bool) if mask is None else mask.bool()

    @property
    def length(self) -> int | None:
        """Most new tokens of a row; None without a limit."""
        limits = [c.max_length for c in self.criteria if _is_criterion(c, "MaxLengthCriteria")]
        return min(limits) - self.ids.shape[1] if limits else None

    @property
    def pad(self) -> Tensor | None:
        """The token that pads finished rows; None where no criterion names an end token."""
        named = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        return self.config._pad_token_tensor if named else None

    @property
    def needs_streamer(self) -> bool:
        """Whether a streamer or a stopping criterion needs the tokens one by one."""
        known = ("MaxLengthCriteria", "EosTokenCriteria")
        plain = all(any(_is_criterion(c, name) for name in known) for c in self.criteria)
        return self.streamer is not None or not plain

    def kinds(self) -> list[tuple[Any, str]]:
        """Processors after guidance, each with its kind or the reason why it is refused."""
        rest = self.processors[1:] if self.guidance is not None else self.processors
        return [(processor, find_kind(processor, self.assume_stateless)) for processor in rest]

    def params(self, chosen: dict[str, Any]) -> SamplingParams:
        """Sampling parameters of the call; `chosen` are fields found among its processors."""
        chosen = {"temperature": 1.0 if self.config.do_sample else 0.0} | chosen
        if self.guidance is None:
            return SamplingParams(**chosen)
        return LogGuidance(float(self.guidance.guidance_scale), **chosen)

    def unconditional(self) -> tuple[Tensor, Tensor]:
        """Negative prompts and their mask, `[B, U]` each; by default the prompt's last token."""
        context = self.guidance.unconditional_context
        ids, mask = context["input_ids"], context["attention_mask"]
        ids = self.ids[:, -1:] if ids is None else ids.to(self.ids.device)
        mask = torch.ones_like(ids) if mask is None else mask.to(self.ids.device)
        return ids, mask.bool()

    def prompt(self) -> Prompt:
        """Rows without their padding; with guidance, then the unconditional rows."""
        branches = [(self.ids, self.mask)]
        if self.guidance is not None:
            branches.append(self.unconditional())
        longest = max(ids.shape[1] for ids, _ in branches)
        aligned = [
            pad(align_left(ids, mask), (0, longest - ids.shape[1])) for ids, mask in branches
        ]
        lengths = torch.cat([mask.sum(1) for _, mask in branches])
        tokens = torch.cat(aligned)[:, : int(lengths.max())]
        stops = [c.eos_token_id for c in self.criteria if _is_criterion(c, "EosTokenCriteria")]
        device = self.model.device
        stop_tokens = torch.cat([s.flatten().to(device) for s in stops]) if stops else None
        tokens, lengths = tokens.to(device), lengths.to(device)
        return Prompt(tokens, lengths, len(branches), stop_tokens, self.layout)


def _is_criterion(criterion: Any, name: str) -> bool:
    kind = type(criterion)
    return kind.__module__ == "transformers.generation.stopping_criteria" and kind.__name__ == name


def align_left(ids: Tensor, mask: Tensor) -> Tensor:
    """Move padding from the left to the right; its content is never attended to."""
    shift = ids.shape[1] - mask.sum(1, keepdim=True)
    index = torch.arange(ids.shape[1], device=ids.device) + shift  # [B, T]
    return ids.gather(1, index.clamp(max=ids.shape[1] - 1))


def hand_over(ids: Tensor, made: Generation, filler: Tensor | None, as_output: bool) -> Any:
    """What `generate` returns.

    Args:
        ids: `[B, T]` int64, the prompts as transformers has them.
        made: the generation `[B, L]` of these rows.
        filler: `[]` int64, pads a row after its end; None where rows have no end.
        as_output: whether transformers' output object is returned.

    Returns:
        `[B, T + longest]` int64, or the object that holds it.
    """
    longest = int(made.lengths.max())
    tokens = made.tokens[:, :longest]
    if filler is not None:
        index = torch.arange(longest, device=tokens.device)
        is_real = index < made.lengths[:, None]
        tokens = torch.where(is_real, tokens, filler.to(tokens.device))
    sequences = torch.cat([ids, tokens.to(ids.device)], 1)
    if not as_output:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=cast(Any, sequences))


_SERVED = {
    "attention_mask",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "tokenizer",  # used by the stopping criteria alone
    "use_cache",
}
_RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def find_obstacles(call: GenerateCall, served: frozenset[str] = frozenset()) -> list[str]:
    """Why the call cannot be served; empty if it can.

    Args:
        call: the call.
        served: arguments for the model that its family uses, in addition to the usual ones.
    """
    found = list(_find_in_arguments(call, served)) or list(_find_in_prompt(call))
    return list(dict.fromkeys([*found, *_find_in_lists(call)]))


def _find_in_arguments(call: GenerateCall, served: frozenset[str]) -> Iterator[str]:
    config, others = call.config, call.others
    if call.synced_gpus:
        yield "synced_gpus"
    if getattr(config, "is_assistant", False):
        yield "a model that drafts for another one"
    if config.return_dict_in_generate:
        yield from (name for name in _RECORDS if getattr(config, name, False))
    given = {name for name, value in others.items() if value is not None}
    if not others.get("mm_encoder_outputs"):  # no images in the prompt
        given.discard("mm_encoder_outputs")
    yield from sorted(given - _SERVED - served)
    cache = others.get("past_key_values")
    if cache is not None:
        if type(cache).__name__ not in ("DynamicCache", "StaticCache") or cache.offloading:
            yield f"a cache of its own kind ({type(cache).__name__})"
        elif getattr(cache, "_is_user_defined", False) or int(cache.get_seq_length()) > 0:
            yield "past_key_values given by the caller"
    yield from find_in_model(call.model)
    if call.ids.device != call.model.device:
        yield "token ids on another device than the model"


def find_in_model(model: Any) -> Iterator[str]:
    """Why a model in its present state can serve no call."""
    effect = find_training_effect(model)
    if effect is not None:
        yield f"training mode with {effect}"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        yield "a model spread over several devices"


def _find_in_prompt(call: GenerateCall) -> Iterator[str]:
    if call.ids.ndim != 2 or call.ids.dtype != torch.int64 or call.ids.shape[1] < 1:
        yield "a prompt that is not token ids [B, T]"
        return
    mask, positions = call.mask, call.others.get("position_ids")
    if mask.shape != call.ids.shape or not is_left_padded(mask):
        yield "an attention mask that does more than hide padding on the left"
        return
    if positions is not None:
        expected = (mask.long().cumsum(-1) - 1)[mask]
        if positions.ndim != 2 or positions.shape[1] != mask.shape[1]:
            yield "position_ids of another shape"
        elif not torch.equal(positions.expand_as(mask)[mask], expected.to(positions.device)):
            yield "position_ids that are not counted from each row's first token"
    length, longest = call.length, call.ids.shape[1]
    if length is None or length < 1:
        yield "no limit on the number of tokens"
        return
    if call.guidance is not None:
        ids, unconditional = call.unconditional()
        if ids.shape[0] != call.ids.shape[0] or not is_left_padded(unconditional):
            yield "negative prompts that are not one per row, padded on the left"
            return
        if not bool(unconditional.all()) and not hasattr(
            text_config(call.model), "rope_parameters"
        ):
            yield "padded negative prompts for a model whose positions are absolute"
        longest = max(longest, ids.shape[1])
    limit = getattr(text_config(call.model), "max_position_embeddings", None)
    if limit is not None and longest + length - 1 > limit:
        yield f"more positions than the model's {limit}"


def _find_in_lists(call: GenerateCall) -> Iterator[str]:
    for name, given in (
        ("LogitsProcessorList", call.processors),
        ("StoppingCriteriaList", call.criteria),
    ):
        if type(given).__name__ != name:
            yield f"a {type(given).__name__} in place of a {name}"
            return
    guidance = call.guidance
    if guidance is not None and guidance.model is not call.model:
        yield "guidance by another model"
    if not any(is_own(processor, GUIDANCE) for processor in call.processors[1:]):
        yield from (kind for _, kind in call.kinds() if kind not in ("flat", "window", "prefix"))
    else:
        yield "guidance after another processor"
    if call.pad is None and any(hasattr(c, "eos_token_id") for c in call.criteria):
        yield "an end token without a padding token"


def is_left_padded(mask: Tensor) -> bool:
    """`[B, T]` bool: False, then True up to the end, at least once."""
    return bool((mask[:, 1:] >= mask[:, :-1]).all()) and bool(mask[:, -1].all())


@dataclass
class OwnLoop:
    """One call of a decoding loop of the model's own, read as a task for a policy.

    Attributes:
        reasons: why the model's own loop has to run; the other fields are used only without one.
        window: the model as a token model.
        prompt: the prompt of all rows.
        length: new tokens of a row.
        params: sampling parameters.
        samples: whether tokens are drawn; a greedy call uses no seed.
        hand_over: turns the generation into what the call returns.
    """

    reasons: list[str] = field(default_factory=list)
    window: TokenModel | None = None
    prompt: Prompt | None = None
    length: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    samples: bool = True
    hand_over: Callable[[Generation], Any] = lambda made: made.tokens

    def decode(
        self, policy: Policy, seed: int | Sequence[int], engine: Engine
    ) -> tuple[Any, Stats]:
        """Run a policy; returns what the call returns, and its statistics."""
        assert self.window is not None and self.prompt is not None
        engine.prepare(self.window, self.prompt, policy, self.params)
        noise = Noise.from_seed(seed, self.prompt.batch, self.prompt.tokens.device)
        made = policy.sample(self.window, self.prompt, self.length, params=self.params, noise=noise)
        return self.hand_over(made), made.stats
