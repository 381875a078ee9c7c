"""Options of every surface, each written once: how a model is opened, and how a call samples.

`from_pretrained` of all pipelines takes the fields of `LoadOptions`; the command line makes a flag
of every field that has a `help`, and hands the object on; ComfyUI's nodes make a widget of it.
"""

from __future__ import annotations

import inspect
import warnings
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypedDict, TypeVar

from mmaccel.checks import UNBOUNDED, Domain, check_fields, is_one, members, show, suggest
from mmaccel.errors import OptionError
from mmaccel.limits import MAX_DIGITS, MAX_EXPRESSION_DEPTH, MAX_VALUE, is_deeper

Switch = Literal["auto"] | bool
"""Whether something is done; "auto" does it where it works."""

FusedSwitch = Switch | Literal["exact"]
"""Whether passes take the fused decoder; see `mmaccel.pipelines.hosts.runner.engine.Engine`."""

_COUNT = Domain(1)
_SWITCHES = {
    **dict.fromkeys(("true", "on", "yes"), True),
    **dict.fromkeys(("false", "off", "no"), False),
}

Options = TypeVar("Options")
Arguments = ParamSpec("Arguments")
Owner = TypeVar("Owner")
Result = TypeVar("Result")


def option(default: Any, help: str | None = None, **flag: Any) -> Any:
    """A field of options, with the `help` of its flag and its widget; None has neither. `names` are
    those of the flag where they are not the field's; `text`: whether a switch is auto, on or off.
    """
    return field(default=default, metadata={"help": help, **flag})


@dataclass(frozen=True)
class HeadTraining:
    """How a head is trained. The rate rises over 50 steps and falls to 0 along a cosine; `seed` is
    that of the pieces.
    """

    steps: int = option(2000, "steps in all", domain=_COUNT)
    batch: int = option(8, "pieces of text a step", domain=_COUNT)
    length: int = option(256, "tokens of a piece", domain=_COUNT)
    ahead: int = option(5, "states of its own that a draft may stand behind", domain=Domain(0, 64))
    rate: float = option(1e-3, "largest learning rate, of AdamW", domain=Domain(0, 1))
    layers: tuple[int, int, int] | None = option(
        None, "three layers whose inputs the head reads", domain=Domain()
    )
    inner: int | None = option(None, "width of its MLP; the model's if missing", domain=_COUNT)
    draft_vocab: int | None = option(
        None, "so many of the most frequent tokens alone", domain=_COUNT
    )
    mixed: bool = option(False, "compute in bfloat16, weights in float32")
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is opened, and how its passes run.

    Attributes:
        device: where to run. "auto" takes CUDA, MPS or XPU where there is one, else the CPU.
        dtype: of the model that predicts tokens, of torch or a name such as "bf16". "auto" is
            bfloat16 on a GPU that computes it and float32 on a CPU; "bitwise" is guaranteed in
            float32 and float64. `torch_dtype` is another name of it.
        device_map: of accelerate, in place of `device`: "auto", a device, or devices by names of
            modules of the model that predicts tokens; other parts are on the first device that
            computes. Not for families that transformers does not load. "disk" is `offload_folder`.
        family: how the checkpoint is read; None detects it.
        cuda_graphs, sync_every, fused, compile, prefill_chunk_size, share_prefix: see
            `mmaccel.pipelines.hosts.runner.engine.Engine`.
        trust_remote_code: whether a checkpoint's own code may run; False refuses those that need
            it.
        revision, variant, token, local_files_only, cache_dir: of a download, as of
            `huggingface_hub`; `variant` is that of the weights, such as "fp16".
    """

    device: Any = option("auto", "auto, cpu, cuda, cuda:1, mps or xpu")
    dtype: Any = option("auto", "auto, float32 (fp32), bfloat16 (bf16) or float16 (fp16)")
    torch_dtype: Any = None
    device_map: Any = None
    offload_folder: str | Path | None = None
    family: str | None = option(
        None, "how the checkpoint is read, see mmaccel models; by default it is detected"
    )
    cuda_graphs: Switch = option(
        "auto",
        "capture forward passes in CUDA graphs: auto, on or off; on needs a GPU",
        text=True,
    )
    sync_every: int = 1
    fused: FusedSwitch = option(
        "auto", "forward passes over packed weights; by default where the model is recognised"
    )
    compile: Switch = option(
        "auto", "compile the fused passes on a CPU; by default where long runs pay for it"
    )
    prefill_chunk_size: int | None = option(
        None, "tokens of prompts that a pass processes at most; by default whole prompts"
    )
    share_prefix: Switch = option(
        False, "store and read once a prompt that several rows have; by default each stores its own"
    )
    trust_remote_code: bool = option(
        False, "run Python code that the model's folder brings; read it first"
    )
    revision: str | None = option(None, "of a hub id: branch, tag or commit")
    variant: str | None = None
    token: str | None = field(default=None, repr=False)
    local_files_only: bool = False
    cache_dir: str | Path | None = None


class PassKeywords(TypedDict, total=False):
    """`pipelines.hosts.runner.engine.Engine` for type checkers."""

    cuda_graphs: Switch
    sync_every: int
    fused: FusedSwitch
    compile: Switch
    prefill_chunk_size: int | None
    share_prefix: Switch


class LoadKeywords(PassKeywords, total=False):
    """`LoadOptions` for type checkers."""

    device: Any
    dtype: Any
    torch_dtype: Any
    device_map: Any
    offload_folder: str | Path | None
    family: str | None
    trust_remote_code: bool
    revision: str | None
    variant: str | None
    token: str | None
    local_files_only: bool
    cache_dir: str | Path | None


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn, as `mmaccel.SamplingParams` has it; None is what the model's authors
    recommend.
    """

    guidance_scale: float | None = option(
        None,
        "how closely to follow the prompt (classifier-free guidance); 1 is off",
        names=("--guidance-scale", "--guidance"),
    )
    temperature: float | None = option(
        None, "how freely tokens are drawn: 0 is greedy, 1 the model's own distribution"
    )
    top_k: int | None = option(None, "keep the k likeliest tokens; 0 keeps all")
    top_p: float | None = option(
        None, "keep the likeliest tokens that make up this share; 1 keeps all"
    )
    min_p: float | None = option(
        None, "keep tokens with this share of the likeliest one's; 0 keeps all"
    )
    top_n_sigma: float | None = option(
        None, "keep tokens within this many standard deviations of the best score (top-n-sigma)"
    )
    top_h: float | None = option(
        None, "keep the likeliest tokens that make up this share of the entropy (top-H)"
    )
    eta_cutoff: float | None = option(
        None, "epsilon of eta sampling, which cuts at min(epsilon, sqrt(epsilon) exp(-entropy))"
    )
    entropy_temperature: float | None = option(
        None, "theta of EDT, which makes the temperature lower where the model is sure"
    )
    divergence_temperature: float | None = option(
        None, "nats between the guidance branches that halve the temperature"
    )
    spread: int | None = None


SAMPLING_FIELDS = tuple(each.name for each in fields(SamplingOptions))


def given(options: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if value is not None}


def sampling_of(options: Any) -> dict[str, Any]:
    names = [each.name for each in fields(options) if each.name in SAMPLING_FIELDS]
    return {name: getattr(options, name) for name in names}


def takes(
    make: Callable[Arguments, Options],
) -> Callable[
    [Callable[[Owner, Options], Result]], Callable[Concatenate[Owner, Arguments], Result]
]:
    """Gives a method the arguments of a dataclass, shown as its own; it receives the object."""

    def decorate(
        method: Callable[[Owner, Options], Result],
    ) -> Callable[Concatenate[Owner, Arguments], Result]:
        @wraps(method)
        def call(owner: Owner, /, *args: Arguments.args, **keywords: Arguments.kwargs) -> Result:
            _check_known(known, where, keywords)
            options = make(*args, **keywords)
            check_fields(options, otherwise=UNBOUNDED)
            return method(owner, options)

        own, known = inspect.signature(method), list(inspect.signature(make).parameters)
        where = method.__qualname__.removesuffix(".__call__")
        first = next(iter(own.parameters.values()))
        parameters = [first, *inspect.signature(make).parameters.values()]
        call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def read_options(kind: type[Options], where: str, keywords: Mapping[str, Any]) -> Options:
    _check_known([each.name for each in fields(kind)], where, keywords)  # type: ignore[arg-type]
    return kind(**keywords)


def _check_known(known: list[str], where: str, keywords: Mapping[str, Any]) -> None:
    for name in keywords:
        if name not in known:
            raise OptionError(
                f"{where}: expected options out of {', '.join(known)}, received {show(name)}; "
                f"{suggest(name, known, 'leave it out')}"
            )


def parse_fields(option: str, texts: Iterable[str], example: str) -> dict[str, Any]:
    """The fields in texts `name=value`, read by `read_text`; they are of the texts' type, see
    `mmaccel.own_code.TypedName`.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, is_given, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not is_given or not name.isidentifier() or name in values:
            raise OptionError(
                f"{option}: expected name=value, each name once, received {show(text)}; "
                f"write for example {example}"
            )
        values[name] = type(text)(value.strip())
    return values


def read_text(name: str, text: str, kind: Any) -> Any:
    """The value that a text is for a field of a type: a Python literal, a word for a switch, or the
    text itself. OptionError where it is too long or too deep.
    """
    if len(text) > MAX_VALUE:
        raise _refuse(name, text, f"at most {MAX_VALUE} characters")
    if is_deeper(text, MAX_EXPRESSION_DEPTH):
        raise _refuse(name, text, f"at most {MAX_EXPRESSION_DEPTH} brackets within brackets")
    kinds = members(kind)
    if bool in kinds and text.lower() in _SWITCHES:
        return _SWITCHES[text.lower()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of texts such as 1if
            value = literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        is_number = int in kinds and text.isascii() and text.isdecimal()  # such as 04
        return int(text) if is_number and len(text) <= MAX_DIGITS else text
    if _has_long_integer(value):
        raise _refuse(name, text, f"integers of at most {MAX_DIGITS} digits")
    is_text = str in kinds and not any(is_one(value, each) for each in kinds)
    return text if is_text else value


def _refuse(option: str, text: str, expected: str) -> OptionError:
    return OptionError(f"{option}: expected {expected}, received {show(text)}; shorten the value")


def _has_long_integer(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_long_integer, (*value, *value.values())))
    if isinstance(value, list | tuple | set):
        return any(map(_has_long_integer, value))
    return isinstance(value, int) and abs(value) >= 10**MAX_DIGITS
