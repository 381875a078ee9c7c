"""Which logits processors a policy can serve, and how it calls them.

It calls them with drafts, some of which are rejected: the result must depend on the arguments
alone. There are three kinds:

- flat: reads one position's scores only; one call for a window.
- window: reads the tokens before the position too, with a form for a window in one call.
- prefix: reads the tokens before the position too; called once per position.

transformers' own are identified by exact class, because a child class may do anything. One of the
caller's own, or a `prefix_allowed_tokens_fn`, is of the prefix kind if marked as stateless; an
unmarked one runs the original loop, and the reason says how to mark it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar, cast

from mmaccel.errors import OptionError
from mmaccel.pipelines.hosts.logits.repetition import WindowRule, penalize_prefix
from mmaccel.samplers.sampling_params import Processor

Kind = Literal["flat", "window", "prefix"]
Function = TypeVar("Function", bound=Callable[..., Any])

_HOME = "transformers.generation.logits_process"
_KINDS: dict[str, Kind] = {
    **dict.fromkeys((
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    ), "flat"),
    **dict.fromkeys((
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
        "WatermarkLogitsProcessor",
    ), "prefix"),
}  # fmt: skip


def is_own(processor: Any, name: str) -> bool:
    """Whether the processor is of exactly that class of transformers."""
    return type(processor).__module__ == _HOME and type(processor).__name__ == name


def stateless(processor: Function) -> Function:
    """Mark a logits processor or a `prefix_allowed_tokens_fn` as one without memory.

    The mark declares that the result for a row depends on that row alone (its number, its ids and
    its scores), on no earlier call or other row. A policy then calls it with drafts too, in any
    order and more than once. Nothing checks the mark: a wrong one gives other tokens than plain
    `generate`.

    On a class the mark is its attribute `is_stateless = True`, which may be written by hand.
    Returns the processor itself; where it takes no attributes (a bound method, an object with
    slots), a wrapper.
    """
    if not callable(processor):
        raise OptionError(
            "stateless: expected a logits processor or a function, received "
            f"{processor!r}; mark each processor of a list by itself"
        )
    try:
        cast(Any, processor).is_stateless = True
    except (AttributeError, TypeError, ValueError):
        return cast(Function, stateless(partial(processor)))
    return processor


def find_window_form(processor: Any) -> Processor | None:
    """The form of a processor that serves a whole window in one call; None without one."""
    if isinstance(processor, WindowRule) and type(processor).__call__ is WindowRule.__call__:
        return processor.over_window
    if is_own(processor, "RepetitionPenaltyLogitsProcessor"):
        ignored = processor.prompt_ignore_length
        if ignored is None or isinstance(ignored, int):  # else one per row
            return partial(penalize_prefix, penalty=processor.penalty, ignored=ignored or 0)
    return None


def find_kind(processor: Any, assume_stateless: bool = False) -> Kind | str:
    """The kind, or the reason why a processor cannot be served; with `assume_stateless` all of the
    caller's own count as marked.
    """
    if find_window_form(processor) is not None:
        return "window"
    function = processor  # the caller's
    what, remedy = "logits processor", "logits_processor=[mmaccel.stateless(processor)]"
    if is_own(processor, "PrefixConstrainedLogitsProcessor"):
        function = processor._prefix_allowed_tokens_fn
        what = "prefix_allowed_tokens_fn"
        remedy = "prefix_allowed_tokens_fn=mmaccel.stateless(function)"
    elif type(processor).__module__ == _HOME:
        name = type(processor).__name__
        return _KINDS.get(name, f"a {name}")
    marks = [getattr(each, "is_stateless", False) for each in (processor, function)]
    if assume_stateless or True in marks:
        return "prefix"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    name = name.rpartition("<locals>.")[2]
    return (
        f"a {what} of the caller's own ({name}), which may remember earlier calls (if it does "
        f"not, pass {remedy}, or attach with assume_stateless=True)"
    )
