"""One `generate` call, read as a decoding task: prompt, length, sampling parameters, stops.

`GenerateCall` reads a call of transformers' `_sample`, `OwnLoop` a loop of the model's own.
`find_obstacles` names what a policy cannot serve, in words that go into the statistics.

Source: `transformers.generation.utils.GenerationMixin.generate` and `_sample`, 5.17 to 5.24.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import Layout, Policy, Prompt, TokenModel
from mmaccel.pipelines.causal_lm.compatibility import (
    ModelFacts,
    find_device,
    find_training_effect,
)
from mmaccel.pipelines.layers.attention_name import own_attention
from mmaccel.pipelines.logits.processor_chain import LogGuidance
from mmaccel.pipelines.logits.processor_support import find_kind, is_own
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.pipelines.transformers_release import CACHE
from mmaccel.results import Generation, Stats
from mmaccel.samplers.noise import Noise
from mmaccel.samplers.sampling_params import SamplingParams

PER_STEP = {"output_scores": "scores", "output_logits": "logits"}
PER_LAYER = {"output_attentions": "attentions", "output_hidden_states": "hidden_states"}
GUIDANCE = "UnbatchedClassifierFreeGuidanceLogitsProcessor"


@dataclass
class GenerateCall:
    """Arguments of one `_sample` call, and what they say; read once.

    Args:
        model: the model.
        ids: `[B, T]` int64, the prompt. It has no columns where the prompt is embeddings alone, and
            only the new ones where the caller's cache holds the others.
        processors: transformers' `LogitsProcessorList`.
        criteria: transformers' `StoppingCriteriaList`.
        config: transformers' `GenerationConfig`.
        synced_gpus: as in `_sample`.
        streamer: as in `_sample`.
        others: all arguments for the model's forward.
        layout: what is known about the tokens of each slot, or None.
        assume_stateless: whether processors of the caller's own count as marked, see
            `mmaccel.stateless`.
        prompt_inputs: arguments for the model's forward that belong to the prompt alone.
        placeholders: ids that stand for a part of an image or a video in a prompt.
        earlier: `[B', L']` int64, what the call before made, where calls are parts of one work.

    Attributes:
        device: of the model.
        guidance: the guidance processor, if it comes first.
        kinds: processors after guidance, each with its kind or the reason why it is refused.
        cache: that the call was given, by the caller or by `generate`; or None.
        n_cached: columns of the prompt that the caller's cache holds, before the call.
        n_columns: columns of the prompt, cached ones included: T where nothing is cached.
        mask: `[B, n_columns]` bool, False on padding and on holes.
        positions: `position_ids` `[B or 1, T]`; `[3, B or 1, T]` on a grid.
        given: names of the arguments for the model's forward that say something.
        is_uncached: whether transformers' loop processes all tokens again at every step.
        has_callers_cache: whether the caller gave a cache, where `generate` prepares one otherwise.
        returns_cache: whether the caller sees the cache after the call.
        records: which outputs of every step the call asks for, of `PER_STEP` and `PER_LAYER`.
        length: most new tokens of a row; None without a limit.
        pad: the token that pads finished rows; None where no criterion names an end token.
        stops: ids of end tokens, of each criterion that has some.
        needs_streamer: whether a streamer or a stopping criterion needs the tokens one by one.
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
    prompt_inputs: frozenset[str] = frozenset()
    placeholders: frozenset[int] = frozenset()
    earlier: Tensor | None = None
    device: torch.device = field(init=False)
    guidance: Any = field(init=False)
    kinds: list[tuple[Any, str]] = field(init=False)
    cache: Any = field(init=False)
    n_cached: int = field(init=False)
    n_columns: int = field(init=False)
    mask: Tensor = field(init=False)
    positions: Tensor | None = field(init=False)
    given: frozenset[str] = field(init=False)
    is_uncached: bool = field(init=False)
    has_callers_cache: bool = field(init=False)
    returns_cache: bool = field(init=False)
    records: frozenset[str] = field(init=False)
    length: int | None = field(init=False)
    pad: Tensor | None = field(init=False)
    stops: list[Tensor] = field(init=False)
    needs_streamer: bool = field(init=False)

    def __post_init__(self) -> None:
        self.device = find_device(self.model)
        if self.ids.dtype == torch.int32:  # the tokens that transformers puts behind them are int64
            self.ids = self.ids.long()
        processors = list(self.processors)
        self.guidance = processors[0] if processors and is_own(processors[0], GUIDANCE) else None
        rest = processors if self.guidance is None else processors[1:]
        self.kinds = [(one, find_kind(one, self.assume_stateless)) for one in rest]
        self._read_arguments()
        self._read_criteria()

    def _read_arguments(self) -> None:
        """Read the arguments for the model's forward, and what of its outputs is wanted."""
        others = self.others
        config = self.config
        self.cache = others.get(CACHE)
        is_known = type(self.cache).__name__ in _CACHES
        self.n_cached = int(self.cache.get_seq_length()) if is_known else 0
        embeddings, mask = others.get("inputs_embeds"), others.get("attention_mask")
        n_ids = self.ids.shape[-1]
        # `generate` drops a mask that hides nothing, and stores its width
        width = getattr(config, "_mask_length", -1) if mask is None else mask.shape[-1]
        self.n_columns = n_ids if width == n_ids else self.n_cached + n_ids
        if embeddings is not None:
            self.n_columns = int(embeddings.shape[1])
        if mask is None:
            mask = self.ids.new_ones(len(self.ids), self.n_columns)
        self.mask = mask.bool()
        self.positions = _read_positions(others.get("position_ids"))
        given = {name for name, value in others.items() if value is not None}
        if not others.get("mm_encoder_outputs"):  # no images in the prompt
            given.discard("mm_encoder_outputs")
        self.given = frozenset(given)
        self.is_uncached = others.get("use_cache") is False
        self.has_callers_cache = getattr(self.cache, "_is_user_defined", False)
        returns_all = config.return_dict_in_generate
        self.returns_cache = self.cache is not None and bool(self.has_callers_cache or returns_all)
        known = PER_STEP | PER_LAYER if returns_all else {}
        self.records = frozenset(known[name] for name in known if getattr(config, name, False))

    def _read_criteria(self) -> None:
        """Read where rows end."""
        home = "transformers.generation.stopping_criteria"
        named = [
            (criterion, type(criterion).__name__ if type(criterion).__module__ == home else "")
            for criterion in self.criteria
        ]
        limits = [one.max_length for one, name in named if name == "MaxLengthCriteria"]
        self.length = min(limits) - self.ids.shape[-1] if limits else None
        self.stops = [one.eos_token_id for one, name in named if name == "EosTokenCriteria"]
        has_end = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        self.pad = self.config._pad_token_tensor if has_end else None
        is_plain = all(name in ("MaxLengthCriteria", "EosTokenCriteria") for _, name in named)
        self.needs_streamer = self.streamer is not None or not is_plain

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

    @cached_property
    def prompt_reasons(self) -> list[str]:
        """Why the model's own prefill has to process the prompt; empty where a window can.

        Calls with guidance, and families of models that have no such prompts, are not served then.
        """
        return list(self._find_prompt_reasons())

    def _find_prompt_reasons(self) -> Iterator[str]:
        names = (*_PROMPT_INPUTS, *sorted(self.prompt_inputs))
        yield from (name for name in names if name in self.given)
        if self.n_cached:
            yield "a cache given by the caller"
        yield from (name for name, kind in PER_LAYER.items() if kind in self.records)
        if not is_left_padded(self.mask):
            yield "an attention mask that does more than hide padding on the left"
            return
        positions = self.positions
        if positions is not None and positions.ndim == 3:
            yield "position_ids on a grid"
        elif positions is not None and not self.n_cached:
            counted = (self.mask.long().cumsum(-1) - 1)[self.mask]
            if positions.shape[-1] != self.mask.shape[1] or not torch.equal(
                positions.expand_as(self.mask)[self.mask], counted.to(positions.device)
            ):
                yield "position_ids that are not counted from each row's first token"

    def prompt(self) -> Prompt:
        """Rows without padding and holes; with guidance, then the unconditional rows.

        Tokens that are not known as ids (embeddings, columns of the caller's cache) are 0; the
        window never processes them, and draft sources make something of them.
        """
        n_unknown = self.n_columns - self.ids.shape[1]
        ids = pad(self.ids, (n_unknown, 0))[:, : self.n_columns]
        branches = [(ids, self.mask)]
        if self.guidance is not None:
            branches.append(self.unconditional())
        longest = max(ids.shape[1] for ids, _ in branches)
        aligned = [
            pad(align_left(ids, mask), (0, longest - ids.shape[1])) for ids, mask in branches
        ]
        lengths = torch.cat([mask.sum(1) for _, mask in branches])
        tokens = torch.cat(aligned)[:, : int(lengths.max())]
        device = self.device
        stop_tokens = None
        if self.stops:
            stop_tokens = torch.cat([stop.flatten().to(device) for stop in self.stops])
        tokens, lengths = tokens.to(device), lengths.to(device)
        is_text = None
        if self.placeholders:
            is_text = ~torch.isin(tokens, tokens.new_tensor(sorted(self.placeholders)))
        return Prompt(tokens, lengths, len(branches), stop_tokens, self.layout, is_text=is_text)


def _read_positions(positions: Tensor | None) -> Tensor | None:
    """`GenerateCall.positions` of `position_ids`.

    Models with positions on a grid take them with three coordinates, and the text's own count
    before these.
    """
    if positions is None or positions.ndim != 3:
        return positions
    coordinates = positions[1:] if len(positions) == 4 else positions
    is_text = bool((coordinates == coordinates[:1]).all())
    return coordinates[0] if is_text else coordinates


def align_left(ids: Tensor, mask: Tensor) -> Tensor:
    """Move columns that are not attended to, padding and holes, to the right."""
    order = (~mask).long().argsort(dim=1, stable=True)  # [B, T]
    return ids.gather(1, order)


def hand_over(
    ids: Tensor,
    made: Generation,
    filler: Tensor | None,
    as_output: bool,
    fields: Mapping[str, Any] | None = None,
) -> Any:
    """What `generate` returns.

    Args:
        ids: `[B, T]` int64, the prompts as transformers has them.
        made: the generation `[B, L]` of these rows.
        filler: `[]` int64, pads a row after its end; None where rows have no end.
        as_output: whether transformers' output object is returned.
        fields: of that object, in addition to the sequences.

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

    return GenerateDecoderOnlyOutput(sequences=cast(Any, sequences), **(fields or {}))


_PROMPT_INPUTS = ("inputs_embeds", "token_type_ids", "mm_token_type_ids")
_SERVED = {
    "attention_mask",
    "logits_to_keep",
    "position_ids",
    "tokenizer",  # used by the stopping criteria alone
    "use_cache",
    *_PROMPT_INPUTS,
    *PER_LAYER,
}
_CACHES = {  # transformers' caches that are read, and their layers
    "DynamicCache": {"DynamicLayer", "DynamicSlidingWindowLayer"},
    "StaticCache": {"StaticLayer", "StaticSlidingWindowLayer"},
}


def find_obstacles(
    call: GenerateCall,
    facts: ModelFacts,
    served: frozenset[str] = frozenset(),
    takes_own_prompt: bool = True,
) -> list[str]:
    """Why the call cannot be served; empty if it can.

    Args:
        call: the call.
        facts: of its model.
        served: arguments for the model that its family uses, in addition to the usual ones.
        takes_own_prompt: whether windows of the family take prompts of `OwnPrompt`.
    """
    found = list(_find_in_arguments(call, served)) or list(_find_in_prompt(call, facts))
    if not found and type(call.cache).__name__ == "StaticCache" and _is_short(call, facts):
        found = ["a StaticCache with less room than the call needs"]
    if not found and call.cache is not None:
        rows = {len(layer.keys) for layer in call.cache.layers if layer.is_initialized}
        found = ["a cache of another number of rows"] if rows - {len(call.ids)} else []
    if not found:
        reasons = [reason for reason in call.prompt_reasons if reason not in served]
        found = list(_find_in_own_prompt(call, facts, reasons)) if takes_own_prompt else reasons
    return list(dict.fromkeys([*found, *_find_in_lists(call)]))


def _find_in_arguments(call: GenerateCall, served: frozenset[str]) -> Iterator[str]:
    config = call.config
    if call.synced_gpus:
        yield "synced_gpus"
    if getattr(config, "is_assistant", False):
        yield "a model that drafts for another one"
    yield from sorted(call.given - _SERVED - {CACHE} - served - call.prompt_inputs)
    for name in sorted(PER_LAYER.keys() & call.given):
        if not isinstance(call.others[name], bool):  # layers, or what the model refuses
            yield f"{name} that is not True or False"
    cache = call.cache
    if cache is not None and (type(cache).__name__ not in _CACHES or cache.offloading):
        yield f"a cache of its own kind ({type(cache).__name__})"
    yield from find_in_model(call.model)
    if call.ids.device not in (call.device, call.model.device):
        yield "token ids on another device than the model"


def find_in_model(model: Any) -> Iterator[str]:
    """Why a model in its present state can serve no call."""
    effect = find_training_effect(model)
    if effect is not None:
        yield f"training mode with {effect}"


def _find_in_prompt(call: GenerateCall, facts: ModelFacts) -> Iterator[str]:
    if call.ids.ndim != 2 or call.ids.dtype != torch.int64 or call.n_columns < 1:
        yield "a prompt that is not token ids [B, T]"
        return
    mask = call.mask
    positions = call.positions
    if mask.shape != (len(call.ids), call.n_columns):
        yield "an attention mask of another shape than the prompt"
        return
    if not bool(mask.any(1).all()):
        yield "an attention mask that hides a whole row"
    reason = _find_in_positions(positions)
    if reason is not None:
        yield reason
        return
    length = call.length
    longest = call.n_columns
    if length is None or length < 1:
        yield "no limit on the number of tokens"
        return
    if call.guidance is not None:
        if not call.ids.shape[1]:
            yield "guidance for a prompt without token ids"
            return
        ids, unconditional = call.unconditional()
        if ids.shape[0] != call.ids.shape[0] or not is_left_padded(unconditional):
            yield "negative prompts that are not one per row, padded on the left"
            return
        if not bool(unconditional.all()) and not hasattr(facts.config, "rope_parameters"):
            yield "padded negative prompts for a model whose positions are absolute"
        longest = max(longest, ids.shape[1])
    if positions is not None:
        longest = max(longest, int(positions.max()) + 1)
    limit = facts.max_positions
    if limit is not None and longest + length - 1 > limit:
        yield f"more positions than the model's {limit}"


def _find_in_positions(positions: Tensor | None) -> str | None:
    """Why text after `positions` cannot be counted on; None if it can."""
    if positions is None or positions.ndim == 2:
        return None
    if positions.ndim != 3 or len(positions) != 3:
        return "position_ids of another shape"
    last = positions[:, :, -1]  # of all three coordinates
    return None if bool((last == last[:1]).all()) else "a prompt that ends in an image"


def _find_in_own_prompt(call: GenerateCall, facts: ModelFacts, reasons: list[str]) -> Iterator[str]:
    """Why the model's own prefill cannot be used where there are `reasons` for it."""
    if not reasons:
        return
    if call.guidance is not None:
        yield from (f"guidance with {reason}" for reason in reasons)
    cache = call.cache
    kinds = set() if cache is None else {type(layer).__name__ for layer in cache.layers}
    if cache is not None and not kinds <= _CACHES[type(cache).__name__]:
        yield f"a cache with layers of other kinds ({', '.join(sorted(kinds))})"
    if call.n_cached >= call.n_columns:
        yield "a cache that holds the whole prompt already"
    if call.records & set(PER_LAYER.values()) and call.is_uncached and not call.mask[:, 0].all():
        yield "hidden states or attentions of padding without a cache, which differ at every step"
    if "attentions" in call.records:
        if own_attention(facts.config) != "eager":
            yield "output_attentions of an attention that gives out no weights"
        if type(cache).__name__ == "StaticCache":
            yield "output_attentions over a StaticCache"
    windows = [window for window in facts.windows if window is not None]
    assert call.length is not None
    if windows and min(windows) < call.n_columns + call.length and _has_holes(call.mask):
        yield "an attention mask with holes for a model with sliding windows"


def _is_short(call: GenerateCall, facts: ModelFacts) -> bool:
    """Whether a layer of a static cache forgets columns, or has no room for them.

    A sliding layer that was made for a shorter call slides over fewer columns than the model's.
    """
    assert call.length is not None
    n_columns = call.n_columns + call.length - 1
    return any(
        layer.max_cache_len < min(n_columns, n_columns if window is None else window)
        for layer, window in zip(call.cache.layers, facts.windows)
    )


def _has_holes(mask: Tensor) -> bool:
    """Whether a row of `[B, T]` bool hides columns after its first token."""
    return bool((mask[:, 1:] < mask[:, :-1]).any())


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
        yield from (kind for _, kind in call.kinds if kind not in ("flat", "window", "prefix"))
    else:
        yield "guidance after another processor"
    if call.pad is None and any(hasattr(c, "eos_token_id") for c in call.criteria):
        yield "an end token without a padding token"
    if call.pad is not None and call.pad.is_floating_point():
        yield "a padding token that is not an id"


def is_left_padded(mask: Tensor) -> bool:
    """`[B, T]` bool: False, then True up to the end, at least once."""
    return not _has_holes(mask) and bool(mask[:, -1].all())


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
