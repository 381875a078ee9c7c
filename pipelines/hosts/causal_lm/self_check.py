"""Self-checks of a causal LM: do its window passes, and our attention kernel, give its own logits?

Some models build a causal mask of their own from the cache's length, which no signature says. So
every model runs a few random tokens once: in one plain call, in window passes that roll back and,
where our attention kernel is requested, in the same passes under it.

Where activations are quantised, other shapes round otherwise: SmolLM2 under `quantize_dynamic` is
1.1 standard deviations from itself in passes of other widths. Such a model is compared with its own
passes of the same shapes, tokens and history, under its own mask and transformers' cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmaccel.contracts import Pass
from mmaccel.errors import MissingBackendError, UnsupportedModelError, describe
from mmaccel.kernels import dispatch
from mmaccel.kernels.device_errors import is_device_error
from mmaccel.pipelines.hosts.causal_lm.compatibility import find_device
from mmaccel.pipelines.hosts.causal_lm.quantization import find_activations
from mmaccel.pipelines.hosts.layers.attention import Choices
from mmaccel.pipelines.hosts.layers.attention_name import own_attention
from mmaccel.samplers.arithmetic import find_product_format
from mmaccel.samplers.compare_logits import Tolerance, same_logits
from mmaccel.samplers.run_lock import in_turn

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.runner.fused_decoder import FusedDecoder

LENGTH = 9
PASSES = (((0, 0), 6), ((2, 6), 3))  # starts of both rows, width; one rolls back, one goes on
SAME_SHAPES = Tolerance(mean=0.01)
FUSED_PARTS = ("attention's input", "attention", "MLP's input", "MLP")
MOST_ROUNDED = 0.1
TIMES = 3.0
HISTORY = 260  # tokens, more than are added up in one block
WIDEST = 32
_passed: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()  # model -> attention
_reasons: WeakKeyDictionary[Any, dict[tuple[Any, ...], str]] = WeakKeyDictionary()


def has_passed(model: Any) -> bool:
    return _passed.get(model) == own_attention(model.config)


@in_turn
def check_windows(model: Any, window: Any) -> None:
    """Refuse a model that `find_facts` accepts, whose windows do not give its own logits; where
    nothing can be compared (NaN, no spread, too few positions) it passes this time.

    Raises:
        UnsupportedModelError: with the difference.
        MissingBackendError: kernels that MMACCEL_KERNELS=triton asks for cannot run.
        RuntimeError: the device failed.

    Cost: three short passes, four where activations are quantised, once with an attention.
    """
    if has_passed(model):
        return
    if window.device.type == "meta":
        _refuse(model, "no weights (the model is on the meta device)")
    if window.max_positions is not None and window.max_positions < LENGTH:
        return
    activations = find_activations(model)
    tolerance = Tolerance.of(model.dtype)
    if activations is not None:
        tolerance = Tolerance(max(SAME_SHAPES.mean, tolerance.mean))
    process = _process_whole if activations is None else _process_alike
    reason = same_logits(partial(process, window), partial(_logits_of, window), tolerance)
    if reason is None:
        return
    if reason:
        too_far = "" if activations is None else f", more than {activations} round,"
        _refuse(model, f"{reason}{too_far}")
    if "local" in (getattr(model.config, "attention_layers", None) or ()):
        _refuse(model, "local attention, counted from the end of the cache,")  # wider than a check
    _passed[model] = own_attention(model.config)


def _refuse(model: Any, received: str) -> NoReturn:
    raise UnsupportedModelError(
        f"model: expected windows to give the model's own logits, received {received} from a "
        f"{type(model).__name__}; its generate cannot be served"
    )


def _process_whole(window: Any) -> list[Tensor]:
    window.reserve(2, LENGTH)  # position ids need it
    ids = _make_ids(window)
    positions = torch.arange(LENGTH, device=ids.device).expand_as(ids)
    whole: Tensor = window.model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        position_ids=window.position_ids(positions),
        use_cache=False,
        return_dict=True,
    ).logits  # [2, LENGTH, V]
    return [
        whole.gather(1, at[..., None].expand(-1, -1, whole.shape[-1]))
        for at in _iterate_positions(ids)
    ]


def _process_alike(window: Any) -> list[Tensor]:
    """Logits `[2, W, V]` of the passes of `PASSES` by the model's own. In between, entries that
    stay are moved to the end of transformers' cache; what is before them counts as padding.
    """
    from transformers.cache_utils import DynamicCache

    window.reserve(2, LENGTH)  # position ids need it
    ids = _make_ids(window)
    cache = DynamicCache()
    of_passes = []
    padding = ids.new_zeros(2, 1)  # entries of each row's cache before its position 0
    for at in _iterate_positions(ids):
        start = at[:, :1]
        n_kept = int(start.max())
        kept = torch.arange(n_kept, device=ids.device) - (n_kept - start)  # positions [2, n_kept]
        index = (padding + kept).clamp(min=0)[:, None, :, None]
        for layer in cache.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)  # [2, H, S, D]
                chosen = index.to(states.device).expand(-1, states.shape[1], -1, states.shape[3])
                setattr(layer, name, states.gather(2, chosen))
        padding = n_kept - start
        logits = window.model(
            input_ids=ids.gather(1, at),
            attention_mask=torch.cat([(kept >= 0).to(at), torch.ones_like(at)], 1),
            position_ids=window.position_ids(at),
            **{window.facts.cache_argument: cache},
            use_cache=True,
            return_dict=True,
        ).logits
        of_passes.append(logits)
    return of_passes


def _run_windows(window: Any, choices: Choices | None = None) -> list[tuple[Tensor, Tensor]]:
    """Logits `[2, W, V]` of the passes of `PASSES`, and what the head reads `[2, W, C]` where kept;
    under our kernel where `choices` collects its calls.
    """
    window.reserve(2, LENGTH)
    if choices is not None:
        window.choices = choices
        window.attention_reason = ""  # our kernel runs
    ids = _make_ids(window)
    return [
        (window.forward(Pass(ids.gather(1, at), at[:, 0])), window.last_states)
        for at in _iterate_positions(ids)
    ]


def _logits_of(window: Any, choices: Choices | None = None) -> list[Tensor]:
    return [logits for logits, _ in _run_windows(window, choices)]


def _iterate_positions(ids: Tensor) -> Iterator[Tensor]:
    for starts, width in PASSES:
        yield ids.new_tensor(starts)[:, None] + torch.arange(width, device=ids.device)


def _make_ids(window: Any, length: int = LENGTH) -> Tensor:
    """Random tokens `[2, length]` int64, the same for every model with this vocabulary size."""
    table = getattr(window.model.get_input_embeddings(), "weight", None)
    n_ids = window.vocab_size if table is None else min(window.vocab_size, table.shape[0])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(n_ids, (2, length), generator=generator, device="cpu")
    return ids.to(find_device(window.model))


def find_reason(window: Any) -> str:
    """Why a window's passes keep the model's own attention; empty: each layer calls our kernel once
    a pass, with the logits of the same passes under the model's own.

    Raises:
        MissingBackendError: `MMACCEL_KERNELS=triton`, and there is a reason other than `model`.

    Cost: four short passes at a model's first call, until its attention, dtype or device changes;
    none for `model`, nor for `auto` away from CUDA devices or under `MMACCEL_KERNELS=torch`.
    """
    attention, mode, device = window.attention, dispatch.mode(), window.device
    if attention == "model":
        return "attention='model'"
    is_auto = attention == "auto"
    reason = ""
    if is_auto and mode == "torch":
        reason = f"{dispatch.VARIABLE}=torch"
    elif is_auto and device.type != "cuda" and mode != "triton":
        reason = f"the model is on {device}"
    elif is_auto:
        reason = dispatch.find_obstacle(device.type) or ""
    reason = reason or _remember(window.model, window, attention, wants_triton=is_auto)
    refuse_own_attention(window.model, reason)
    return reason


def find_layer_obstacle(window: Any) -> str:
    """Why a model's layers cannot attend by a function of ours; empty where they can."""
    return _remember(window.model, window, "layers", wants_triton=False)


def refuse_own_attention(model: Any, reason: str) -> None:
    if reason and dispatch.mode() == "triton":
        raise MissingBackendError(
            f"{dispatch.VARIABLE}=triton: expected a model that attends by window_attention, "
            f"received {type(model).__name__}: {reason}; or set {dispatch.VARIABLE}=auto"
        )


@in_turn
def _remember(model: Any, window: Any, question: str, wants_triton: bool) -> str:
    if getattr(model.config, "output_attentions", False):
        return "the model gives out its attention weights"
    if window.max_positions is not None and window.max_positions < LENGTH:
        return f"the model has {window.max_positions} positions; a self-check needs {LENGTH}"
    if window.device.type == "meta":
        return "the model has no weights (it is on the meta device)"
    key = (own_attention(model.config), model.dtype, window.device, question, dispatch.mode())
    known = _reasons.setdefault(model, {})
    if key in known:
        return known[key]
    reason = _check_kernel(window.plain(), wants_triton=wants_triton)
    if reason is None:
        return "the model's logits are NaN or all alike: nothing to compare"
    if torch.OutOfMemoryError.__name__ not in reason:  # there may be memory for the next run
        known[key] = reason
    return reason


def _check_kernel(plain: Any, wants_triton: bool) -> str | None:
    """The reason, empty where the model passes; None where nothing can be compared."""
    choices: Choices = []
    own, kernel = partial(_logits_of, plain), partial(_logits_of, plain, choices)
    try:
        reason = same_logits(own, kernel, Tolerance.of(plain.model.dtype))
    except UnsupportedModelError as error:
        return str(error)
    reasons = [f"under the kernel {reason}"] if reason else []
    called = [layer for layer, _ in choices]
    expected = list(range(len(plain.facts.windows))) * len(PASSES)
    if called != expected:
        reasons.append(
            f"{type(plain.model).__name__}: {len(called)} of {len(expected)} calls of attention "
            "asked transformers for a function by name"
        )
    if wants_triton:
        reasons += [choice.reason for _, choice in choices if choice.backend != "triton"][:1]
    return None if reason is None and not reasons else "; ".join(reasons)


@torch.no_grad()
def check_fused(plain: Any, decoder: FusedDecoder) -> str:
    """Why a fused decoder does not serve a model; empty where it gives the model's own logits.

    What each layer's attention and MLP read and answer is compared with the model's own, then
    replaced by it, so that no rounding hides another layer's error. In the mean it may be off by a
    unit in the last place of a short format (1e-5 otherwise) of its size, or `TIMES` as far as the
    model's own with its products rounded another way, up to `MOST_ROUNDED`. Then what the head
    reads, and the logits.

    Cost: four short passes; six in short formats where rounding is more than a unit.
    """
    model = plain.model
    if plain.max_positions is not None and plain.max_positions < LENGTH:
        return f"{plain.max_positions} positions; a self-check needs {LENGTH}"
    is_short = model.dtype not in (torch.float32, torch.float64)
    plain.keeps_states = True
    met: list[Tensor] = []  # what the model's own layers read and answer

    def keep(x: Tensor) -> Tensor:
        met.append(x)
        return x

    try:
        with decoder.meeting(keep):
            own = _run_windows(plain)
        plain.setup.fused = decoder
        received, off = _follow(plain, decoder, met)
        limit = torch.full_like(off, torch.finfo(model.dtype).eps if is_short else 1e-5)
        if bool((off > limit).any()):
            plain.setup.fused = False
            with _rounded_otherwise(decoder.linears):
                rounded = _follow(plain, decoder, met)[1]
            limit = limit.maximum((TIMES * rounded).clamp(max=MOST_ROUNDED))
    except Exception as error:  # the model's own forward serves, unless the device failed
        if is_device_error(error):
            raise
        return f"layers that end the fused decoder in a {describe(error)}"
    at = int((off / limit).nan_to_num(torch.inf).argmax())
    if not off[at] <= limit[at]:  # NaN, too
        layer = at // len(FUSED_PARTS) % len(plain.facts.windows)
        return (
            f"layer {layer}, whose {FUSED_PARTS[at % len(FUSED_PARTS)]} is {off[at]:.2g} of its "
            f"size off in the fused decoder, of which rounding explains {limit[at]:.2g}"
        )
    # transformers computes norms in float32 in models of float64, too
    tolerance = Tolerance.of(model.dtype) if is_short else Tolerance.strict(torch.float32)
    first = 1 if decoder.head is None else 0  # of (logits, states): without a head states alone
    compared = [each for pair in own for each in pair[first:]]
    answers = [each for pair in received for each in pair[first:]]
    reason = same_logits(lambda: compared, lambda: answers, tolerance)
    if reason is None:
        return "logits that are NaN or all alike: nothing to compare"
    if reason:
        return f"{reason} in the fused decoder"
    if dispatch.mode() != "triton" or not decoder.has_row_products or decoder.head is None:
        return ""
    plain.setup.fused = decoder
    expected = [logits for logits, _ in own]  # passes whose layers nothing meets
    reason = same_logits(lambda: expected, partial(_logits_of, plain), Tolerance.of(model.dtype))
    return f"{reason} in products of few rows" if reason else ""


@torch.no_grad()
def find_other_bits(plain: Any, decoder: FusedDecoder) -> str:
    """What of a fused decoder (a layer's attention or MLP, the logits) has other bits in passes of
    another width or batch; empty: nothing. Cost: some 30 short passes behind `HISTORY` tokens, once
    for a dtype and number of threads.
    """
    if decoder.head is None:
        return decoder.head_reason
    format = find_product_format(plain.device.type)
    key = (
        "bits", plain.model.dtype, format, torch.get_num_threads(), plain.attention,
        dispatch.mode(),
    )  # fmt: skip
    known = _reasons.setdefault(plain.model, {})
    if key not in known:
        known[key] = _find_other_bits(plain, decoder)
    return known[key]


def _find_other_bits(window: Any, decoder: FusedDecoder) -> str:
    most = HISTORY if window.max_positions is None else window.max_positions - WIDEST
    history = min(HISTORY, most)
    if history < 1:
        return f"{window.max_positions} positions; a self-check needs {WIDEST + 1}"
    ids = _make_ids(window, history + WIDEST)
    window.setup.fused = decoder

    def process(rows: int, width: int, n_tokens: int) -> list[Tensor]:
        """Row 0 of all that passes of a width compute, each `[n_tokens, …]`; others lag behind."""
        of_passes: list[list[Tensor]] = []
        for start in range(history, history + n_tokens, width):
            starts = torch.arange(start, start - rows, -1, device=ids.device).clamp(min=0)
            at = starts[:, None] + torch.arange(width, device=ids.device)
            met: list[Tensor] = []
            with decoder.meeting(partial(_keep, met, width)):
                logits = window.forward(Pass(ids[:rows].gather(1, at), starts))
            of_passes.append([*met, logits[0]])
        return [torch.cat(pieces) for pieces in zip(*of_passes)]

    expected: list[Tensor] = []
    for rows in (1, 2):
        window.reserve(rows, history + WIDEST)
        window.prefill(Pass(ids[:rows, :history], ids.new_zeros(rows)))
        for width in (WIDEST, 8, 3, 2, 1):
            received = process(rows, width, WIDEST if width >= 8 else 6)
            expected = expected or received
            for number, (own, other) in enumerate(zip(expected, received)):
                if not torch.equal(own[: len(other)], other):
                    layer, part = divmod(number, len(FUSED_PARTS))
                    what = "the logits"
                    if number < len(expected) - 1:
                        what = f"{FUSED_PARTS[part]} of layer {layer}"
                    return (
                        f"other bits of {what} in passes of {rows} x {width} tokens than in one of "
                        f"{WIDEST}"
                    )
    return ""


def _keep(kept: list[Tensor], count: int, x: Tensor) -> Tensor:
    kept.append(x[:count])
    return x


def _follow(
    window: Any, decoder: FusedDecoder, own: list[Tensor]
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """`_run_windows` on the model's own numbers, and each mean error, as a part of the size."""
    expectations = iter(own)
    off = []

    def replace(x: Tensor) -> Tensor:
        expected = next(expectations).view_as(x)
        size = expected.abs().mean(dtype=torch.float32).clamp(min=1e-30)  # of zeros, too
        off.append(((x - expected).abs().mean(dtype=torch.float32) / size).to(window.device))
        return expected

    with decoder.meeting(replace):
        outputs = _run_windows(window)
    return outputs, torch.stack(off)


@contextmanager
def _rounded_otherwise(linears: list[Any]) -> Iterator[None]:
    """Linear layers answer what is by chance up to half a unit of the last place off."""

    def shift(module: torch.nn.Module, args: Any, y: Tensor) -> Tensor:
        shape = (y.shape[-1],)
        generator = torch.Generator().manual_seed(y.shape[-1])
        units = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") - 0.5
        factor = 1 + units.to(y.device) * torch.finfo(y.dtype).eps
        return (y.to(torch.promote_types(y.dtype, torch.float32)) * factor).to(y.dtype)

    hooks = [linear.register_forward_hook(shift) for linear in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
