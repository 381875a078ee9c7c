"""Calls of hosts, read once: what each argument means, and the task that comes out.

A host's table says what becomes of every argument of its call (`Argument`). Arguments that nothing
reads refuse a canvas's call, and let a call of transformers' `_sample` run the original loop; the
reasons of `find_obstacles` go into the statistics.

Source: `transformers.generation.utils.GenerationMixin.generate` and `_sample`, 5.17 to 5.24.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmaccel.contracts import Layout, Prompt
from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.causal_lm.compatibility import (
    ModelFacts,
    find_device,
    find_training_effect,
)
from mmaccel.pipelines.hosts.layers.attention_name import own_attention
from mmaccel.pipelines.hosts.logits.processor_chain import LogGuidance
from mmaccel.pipelines.hosts.logits.processor_support import find_kind, is_own
from mmaccel.pipelines.hosts.transformers_release import CACHE
from mmaccel.results import Generation, OnStep
from mmaccel.samplers.sampling_params import SamplingParams

Use = Literal["read", "prompt", "ignore", "refuse"]


@dataclass(frozen=True)
class Argument:
    """A row of a host's table."""

    # "read" by a policy's run, "prompt": by the model's own pass over the prompt, "ignore": it
    # changes no token
    use: Use
    remedy: str = ""  # what helps where it is refused; {policy} is the name of the policy's class
    neutral: Any = None  # a value that asks for nothing, as None does

    def asks(self, value: Any) -> bool:
        is_number = isinstance(value, int | float)
        is_alike = isinstance(value, bool) == isinstance(self.neutral, bool)
        return value is not None and not (is_number and is_alike and value == self.neutral)


Table = dict[str, Argument]
READ, OF_PROMPT, IGNORED = Argument("read"), Argument("prompt"), Argument("ignore")
_UNKNOWN = Argument("refuse")
PER_STEP = {"output_scores": "scores", "output_logits": "logits"}
PER_LAYER = {"output_attentions": "attentions", "output_hidden_states": "hidden_states"}
SAMPLE: Table = {  # of transformers' `_sample`, for the model's forward; None: what is not here
    **dict.fromkeys(("attention_mask", "position_ids", "use_cache", CACHE), READ),
    **dict.fromkeys(("inputs_embeds", "token_type_ids", "mm_token_type_ids"), OF_PROMPT),
    **dict.fromkeys(PER_LAYER, OF_PROMPT),
    **dict.fromkeys(("logits_to_keep", "tokenizer"), IGNORED),  # stopping criteria have the second
}
GUIDANCE = "UnbatchedClassifierFreeGuidanceLogitsProcessor"


def sort_arguments(given: Mapping[str, Any], table: Table) -> dict[Use, dict[str, Any]]:
    """Arguments that ask for something by their use; those that a table lacks are refused."""
    by_use: dict[Use, dict[str, Any]] = {use: {} for use in ("read", "prompt", "ignore", "refuse")}
    for name, value in given.items():
        row = table.get(name, _UNKNOWN)
        if row.asks(value):
            by_use[row.use][name] = value
    return by_use


def refuse_arguments(given: Mapping[str, Any], table: Table, policy: Any) -> None:
    """Refuse arguments that a policy's run does not take; those that a table lacks pass."""
    name = type(policy).__name__
    for argument, row in table.items():
        if row.use == "refuse" and row.asks(given.get(argument)):
            raise OptionError(
                f"{argument}: expected none under {name}, received {given[argument]!r}; "
                f"{row.remedy.format(policy=name)}"
            )


@dataclass
class Task:
    """A host's call as a policy decodes it."""

    # why the host's own loop has to run; the other fields are used only without one
    reasons: list[str] = field(default_factory=list)
    model: Any = None  # that decodes; None where the service has it
    prompt: Any = None
    length: int = 0  # new tokens of a row
    params: SamplingParams = field(default_factory=SamplingParams)
    samples: bool = True  # a greedy call uses no seed
    seed: int | Sequence[int] | None = None  # None: the service chooses it
    on_step: OnStep | None = None
    prefill_chunk_size: int | None = None
    # turns the generation into what the call returns
    hand_over: Callable[[Generation], Any] = lambda generation: generation.tokens


# ------------------------------------------------------------------- `_sample` of transformers


@dataclass
class GenerateCall:
    """Arguments of one `_sample` call, and what they say; read once."""

    model: Any
    # [B, T] int64, the prompt: no columns where it is embeddings alone, and only the new ones
    # where the caller's cache holds the others
    ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    synced_gpus: bool = False
    streamer: Any = None
    others: dict[str, Any] = field(default_factory=dict)  # all arguments for the model's forward
    layout: Layout | None = None
    assume_stateless: bool = False  # processors of the caller's own count as `mmaccel.stateless`
    arguments: Table = field(default_factory=lambda: SAMPLE)  # of the model's family
    placeholders: frozenset[int] = frozenset()  # ids that stand for a part of an image or a video
    earlier: Tensor | None = None  # [B', L'] int64, what the call before made, in a series
    window: Any = None  # its window, where nothing but such calls runs the model

    def __post_init__(self) -> None:
        self.device = find_device(self.model)
        if self.ids.dtype == torch.int32:  # the tokens that transformers puts behind them are int64
            self.ids = self.ids.long()
        processors = list(self.processors)
        is_guided = bool(processors) and is_own(processors[0], GUIDANCE)
        self.guidance: Any = processors.pop(0) if is_guided else None
        # of processors after guidance, their kind or the reason why it is refused
        self.kinds = [(each, find_kind(each, self.assume_stateless)) for each in processors]
        self._read_arguments()
        self._read_criteria()

    def _read_arguments(self) -> None:
        others = dict(self.others)
        config = self.config
        self.cache = cast(Any, others.get(CACHE))
        is_known = type(self.cache).__name__ in _CACHES
        try:  # columns of the prompt that the caller's cache holds
            self.n_cached = int(self.cache.get_seq_length()) if is_known else 0
        except ValueError:  # no layer attends (Mamba)
            self.n_cached = 0
        embeddings, mask = others.get("inputs_embeds"), others.get("attention_mask")
        n_ids = self.ids.shape[-1]
        # `generate` drops a mask that hides nothing, and stores its width
        width = getattr(config, "_mask_length", -1) if mask is None else mask.shape[-1]
        self.n_columns = n_ids if width == n_ids else self.n_cached + n_ids
        if embeddings is not None:
            self.n_columns = int(embeddings.shape[1])
        if mask is None:
            mask = self.ids.new_ones(len(self.ids), self.n_columns)
        self.mask: Tensor = mask.bool()  # [B, n_columns], False on padding and on holes
        positions = others.get("position_ids")
        if positions is not None and positions.ndim == 3:
            # on a grid: three coordinates, and the text's own count before these
            positions = positions[1:] if len(positions) == 4 else positions
            if bool((positions == positions[:1]).all()):  # a text
                positions = positions[0]
        self.positions: Tensor | None = positions  # [B or 1, T], or [3, B or 1, T] on a grid
        if not others.get("mm_encoder_outputs"):  # no images in the prompt
            others.pop("mm_encoder_outputs", None)
        self.given = sort_arguments(others, self.arguments)
        # then transformers' loop processes all tokens again at every step
        self.is_uncached = others.get("use_cache") is False
        self.has_callers_cache: bool = getattr(self.cache, "_is_user_defined", False)
        returns_all = config.return_dict_in_generate
        # whether the caller sees the cache after the call
        self.returns_cache = self.cache is not None and bool(self.has_callers_cache or returns_all)
        known = PER_STEP | PER_LAYER if returns_all else {}
        # outputs of every step that the call asks for
        self.records = frozenset([known[name] for name in known if getattr(config, name, False)])

    def _read_criteria(self) -> None:
        """Read where rows end."""
        self.length: int | None = None  # most new tokens of a row
        self.stops: list[Tensor] = []  # ids of end tokens, of each criterion that has some
        self.has_end = False
        self.needs_streamer = self.streamer is not None  # or a criterion needs tokens one by one
        for criterion in self.criteria:
            cls = type(criterion)
            is_transformers = cls.__module__ == "transformers.generation.stopping_criteria"
            self.has_end |= hasattr(criterion, "eos_token_id")
            if is_transformers and cls.__name__ == "MaxLengthCriteria":
                length = criterion.max_length - self.ids.shape[-1]
                self.length = length if self.length is None else min(self.length, length)
            elif is_transformers and cls.__name__ == "EosTokenCriteria":
                self.stops.append(criterion.eos_token_id)
            else:
                self.needs_streamer = True
        self.pad: Tensor | None = self.config._pad_token_tensor if self.has_end else None

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
        """Why the model's own prefill has to process the prompt; empty where a window can."""
        reasons = [name for name in self.given["prompt"] if name not in PER_LAYER]
        if self.n_cached:
            reasons.append("a cache given by the caller")
        for name, kind in PER_LAYER.items():
            if kind in self.records and self.arguments.get(name) == OF_PROMPT:
                reasons.append(name)
        positions = self.positions
        if not is_left_padded(self.mask):
            reasons.append("an attention mask that does more than hide padding on the left")
        elif positions is not None and positions.ndim == 3:
            reasons.append("position_ids on a grid")
        elif positions is not None and not self.n_cached:
            counted = (self.mask.long().cumsum(-1) - 1)[self.mask]
            if positions.shape[-1] != self.mask.shape[1] or not torch.equal(
                positions.expand_as(self.mask)[self.mask], counted.to(positions.device)
            ):
                reasons.append("position_ids that are not counted from each row's first token")
        return reasons

    @cached_property
    def whole_config(self) -> Any:
        """The configuration of a prefill in one pass."""
        config = copy(self.config)
        config.prefill_chunk_size = None
        return config

    def prompt(self) -> Prompt:
        """Rows without padding and holes; with guidance, then the unconditional rows.

        Tokens not known as ids (embeddings, a caller's cache) are 0, and never processed here.
        """
        n_unknown = self.n_columns - self.ids.shape[1]
        ids = pad(self.ids, (n_unknown, 0))[:, : self.n_columns]
        branches = [(ids, self.mask)]
        if self.guidance is not None:
            branches.append(self.unconditional())
        tokens, lengths = join_branches(branches, self.device)
        stop_tokens = None
        if self.stops:
            stop_tokens = torch.cat([stop.flatten().to(self.device) for stop in self.stops])
        is_text = None
        if self.placeholders:
            is_text = ~torch.isin(tokens, tokens.new_tensor(sorted(self.placeholders)))
        return Prompt(tokens, lengths, len(branches), stop_tokens, self.layout, is_text=is_text)


def align_left(ids: Tensor, mask: Tensor) -> Tensor:
    """Move columns that are not attended to, padding and holes, to the right."""
    order = (~mask).long().argsort(dim=1, stable=True)  # [B, T]
    return ids.gather(1, order)


def join_branches(
    branches: Sequence[tuple[Tensor, Tensor]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Ids and masks `[B, T]` of each branch as right-padded tokens `[R, T']` and lengths `[R]`."""
    longest = max(ids.shape[1] for ids, _ in branches)
    aligned = [pad(align_left(ids, mask), (0, longest - ids.shape[1])) for ids, mask in branches]
    lengths = torch.cat([mask.sum(1) for _, mask in branches])
    return torch.cat(aligned)[:, : int(lengths.max())].to(device), lengths.to(device)


def count_to_end(tokens: Tensor, ends: int | Tensor) -> Tensor:
    """`[B]` int64: slots of `[B, L]` tokens up to and with the first end token, or all L."""
    length = tokens.shape[1]
    index = torch.arange(length, device=tokens.device)
    ends = ends.to(tokens.device) if isinstance(ends, Tensor) else ends
    return torch.where(torch.isin(tokens, ends), index + 1, length).amin(1)


def hand_over(
    ids: Tensor,
    generation: Generation,
    filler: Tensor | None,
    as_output: bool,
    fields: Mapping[str, Any] | None = None,
) -> Any:
    """What `generate` returns: `[B, T + longest]` int64, or transformers' object that holds it.

    Args:
        ids: `[B, T]` int64, the prompts as transformers has them.
        filler: `[]` int64, pads a row after its end; None where rows have no end.
        fields: of that object beside the sequences.
    """
    longest = int(generation.lengths.max())
    tokens = generation.tokens[:, :longest]
    if filler is not None:
        index = torch.arange(longest, device=tokens.device)
        is_real = index < generation.lengths[:, None]
        tokens = torch.where(is_real, tokens, filler.to(tokens.device))
    sequences = torch.cat([ids, tokens.to(ids.device)], 1)
    if not as_output:
        return sequences
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=cast(Any, sequences), **(fields or {}))


_CACHES = {  # transformers' caches that are read, and their layers
    "DynamicCache": {"DynamicLayer", "DynamicSlidingWindowLayer"},
    "StaticCache": {"StaticLayer", "StaticSlidingWindowLayer"},
}


def find_obstacles(
    call: GenerateCall, facts: ModelFacts, takes_own_prompt: bool = True
) -> list[str]:
    """Why a window cannot serve the call; empty if one can."""
    reasons = (  # each is asked only where those before it find nothing
        list(find_in_call(call))
        or list(_find_in_shapes(call, facts))
        or list(_find_in_lengths(call, facts))
        or list(_find_in_own_prompt(call, facts, takes_own_prompt))
    )
    guidance = call.guidance
    if guidance is not None and guidance.model is not call.model:
        reasons.append("guidance by another model")
    if any(is_own(processor, GUIDANCE) for processor in call.processors[1:]):
        reasons.append("guidance after another processor")
    else:
        reasons += [kind for _, kind in call.kinds if kind not in ("flat", "window", "prefix")]
    if call.has_end and call.pad is None:
        reasons.append("an end token without a padding token")
    return list(dict.fromkeys(reasons))


def find_in_call(call: GenerateCall) -> Iterator[str]:
    """Why no window and no stream of codes can serve the call."""
    if call.synced_gpus:
        yield "synced_gpus"
    if getattr(call.config, "is_assistant", False):
        yield "a model that drafts for another one"
    yield from sorted(call.given["refuse"])
    yield from find_in_model(call.model)
    if call.length is None or call.length < 1:
        yield "no limit on the number of tokens"


def find_in_model(model: Any) -> Iterator[str]:
    """Why a model in its present state can serve no call."""
    effect = find_training_effect(model)
    if effect is not None:
        yield f"training mode with {effect}"


def _find_in_shapes(call: GenerateCall, facts: ModelFacts) -> Iterator[str]:
    cache = call.cache
    positions = call.positions
    if cache is not None and (type(cache).__name__ not in _CACHES or cache.offloading):
        yield f"a cache of its own kind ({type(cache).__name__})"
    elif call.ids.ndim != 2 or call.ids.dtype != torch.int64 or call.n_columns < 1:
        yield "a prompt that is not token ids [B, T]"
    elif call.ids.device not in (call.device, call.model.device):
        yield "token ids on another device than the model"
    elif call.mask.shape != (len(call.ids), call.n_columns):
        yield "an attention mask of another shape than the prompt"
    elif not bool(call.mask.any(1).all()):
        yield "an attention mask that hides a whole row"
    elif positions is not None and positions.ndim != 2:
        if positions.ndim != 3 or len(positions) != 3:
            yield "position_ids of another shape"
        elif bool((positions[:, :, -1] != positions[:1, :, -1]).any()):
            yield "a prompt that ends in an image"
    if call.guidance is not None:
        ids, mask = call.unconditional()
        if not call.ids.shape[1]:
            yield "guidance for a prompt without token ids"
        elif ids.shape[0] != call.ids.shape[0] or not is_left_padded(mask):
            yield "negative prompts that are not one per row, padded on the left"
        elif not bool(mask.all()) and not hasattr(facts.config, "rope_parameters"):
            yield "padded negative prompts for a model whose positions are absolute"


def _find_in_lengths(call: GenerateCall, facts: ModelFacts) -> Iterator[str]:
    longest = call.n_columns
    assert call.length is not None
    if call.guidance is not None:
        longest = max(longest, call.unconditional()[0].shape[1])
    if call.positions is not None:
        longest = max(longest, int(call.positions.max()) + 1)
    limit = facts.max_positions
    if limit is not None and longest + call.length - 1 > limit:
        yield f"more positions than the model's {limit}"
    if call.cache is None:
        return
    layers = call.cache.layers
    if type(call.cache).__name__ == "StaticCache":
        # a sliding layer that was made for a shorter call slides over fewer columns
        n_columns = call.n_columns + call.length - 1
        sizes = zip(layers, facts.windows)
        if any(
            layer.max_cache_len < min(n_columns, window or n_columns) for layer, window in sizes
        ):
            yield "a StaticCache with less room than the call needs"


def _find_in_own_prompt(
    call: GenerateCall, facts: ModelFacts, takes_own_prompt: bool
) -> Iterator[str]:
    """Why the model's own prefill cannot be used where there are reasons for it."""
    reasons = call.prompt_reasons
    if not reasons:
        return
    if not takes_own_prompt:
        yield from reasons
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
    is_narrow = windows and min(windows) < call.n_columns + call.length
    if is_narrow and not is_left_padded(call.mask):
        yield "an attention mask with holes for a model with sliding windows"


def is_left_padded(mask: Tensor) -> bool:
    """`[B, T]` bool: False, then True up to the end, at least once."""
    return bool((mask[:, 1:] >= mask[:, :-1]).all() & mask[:, -1].all())


# --------------------------------------------------------------------------- diffusers' pipelines


def bind_call(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Arguments of a call by name: those given, and with defaults; None if `own` refuses them."""
    try:
        bound = inspect.signature(function).bind(*args, **options)
    except TypeError:
        return None
    given = dict(bound.arguments)
    bound.apply_defaults()
    return given, dict(bound.arguments)
