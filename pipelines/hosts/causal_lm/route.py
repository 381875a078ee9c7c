"""The forward of a run: the model's own, or the fused decoder's over the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mmaccel.contracts import Route
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.compatibility import check_mode
from mmaccel.pipelines.hosts.causal_lm.quantization import describe_sharing, find_activations
from mmaccel.pipelines.hosts.causal_lm.self_check import check_fused, find_other_bits
from mmaccel.pipelines.hosts.layers.attention import WindowPass
from mmaccel.pipelines.hosts.layers.attention_function import window_attention_in
from mmaccel.pipelines.hosts.layers.attention_inputs import find_attending
from mmaccel.pipelines.hosts.layers.attention_name import find_configs
from mmaccel.pipelines.hosts.runner.compiled_passes import CompiledRun
from mmaccel.pipelines.hosts.runner.fused_decoder import FusedDecoder, close_fused, open_fused
from mmaccel.pipelines.hosts.runner.own_products import (
    OwnProducts,
    close_own_products,
    open_own_products,
    own_products,
)

if TYPE_CHECKING:
    from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow


@dataclass
class ForwardRoute:
    """What a run has chosen."""

    decoder: FusedDecoder | None = None  # None: the model's own forward
    name: str = "model"  # or "fused", or "compiled" since a pass of the fused decoder ran compiled
    reason: str = "no run has begun"  # why not another one
    same_bits: bool = False  # whether passes so far had the same bits at any width and batch
    own: OwnProducts | None = None  # products of the model's own forward; None: as they are
    compiled: CompiledRun | None = None  # which passes of the decoder run compiled
    this: WindowPass | None = None  # that the decoder's layers run now; None: under masks
    _configs: list[Any] = field(default_factory=list)  # in which layers look up their attention
    _attending: list[nn.Module] = field(default_factory=list)  # where hidden states are read

    @contextmanager
    def attending(self, model: Any, this: WindowPass) -> Iterator[None]:
        """Inside the block, the layers of the model or of the decoder attend as a pass says."""
        if self.decoder is None:
            self._configs = self._configs or find_configs(model)
            if this.reads_hidden:
                self._attending = self._attending or find_attending(model)
            with window_attention_in(self._configs, this, self._attending):
                yield
            return
        self.this = this
        try:
            yield
        finally:  # a prompt after a pass that failed is processed under masks
            self.this = None


def choose_forward(window: CausalLMWindow) -> ForwardRoute:
    """The forward of a window's next run. A model that changed is packed and checked again.

    Raises:
        UnsupportedModelError: `fused=True` or `compile=True`, and the fused decoder does not serve
            the model; `fused="exact"`, and its bits differ.

    Cost: one visit of every module and parameter; four short passes at a model's first run.
    """
    model = window.model
    fused = window.setup.fused
    compile = False if fused == "exact" else window.setup.compile
    chosen = ForwardRoute(reason=_find_obstacle(window))
    if not chosen.reason and isinstance(fused, FusedDecoder):
        chosen.decoder = fused
    elif not chosen.reason:
        chosen.decoder, chosen.reason = _open_decoder(window)
        option, value = ("compile", True) if compile is True else ("fused", fused)
        is_demanded = value in (True, "exact")
        if is_demanded and chosen.decoder is None:
            raise UnsupportedModelError(
                f"{option}={value!r}: expected a model that the fused decoder serves, received "
                f"a {type(model).__name__} with {chosen.reason}; set {option}='auto'"
            )
        if chosen.decoder is None:
            chosen.own = open_own_products(model)
    served = chosen.decoder or chosen.own
    if served is not None and served.products.reordered_bytes:
        copied = f"{served.products.reordered_bytes >> 20} MB of weights once more for oneDNN"
        chosen.reason = f"{chosen.reason}; {copied}" if chosen.reason else copied
    if chosen.decoder is not None:
        chosen.name = "fused"
        chosen.same_bits = fused == "exact"
        runner = window.setup.runner
        chosen.compiled = CompiledRun(compile, runner is not None and runner.is_static)
    return chosen


def _find_obstacle(window: CausalLMWindow) -> str:
    if window.setup.fused is False:
        return "fused=False"
    if window.pass_options:
        return f"the call asks for {', '.join(window.pass_options)}"
    obstacle = "" if window.own_prompt is None else window.own_prompt.fused_obstacle
    kind = window.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return obstacle or ("autocast is on" if is_cast else "")


def _open_decoder(window: CausalLMWindow) -> tuple[FusedDecoder | None, str]:
    check_mode(window.model)  # a self-check needs it
    is_exact = window.setup.fused == "exact"
    decoder, reason = open_fused(
        window.model, window.facts.windows, lambda decoder: check_fused(window.plain(), decoder)
    )
    if decoder is None:
        return None, reason
    decoder.use_same_bits(is_exact)
    if is_exact:
        plain = window.plain()
        plain.attention = window.attention
        reason = find_other_bits(plain, decoder)
        if reason:
            return None, reason
    if decoder.head is None and window.needs_head:
        return None, decoder.head_reason
    return decoder, reason


def run_model(window: CausalLMWindow, inputs: dict[str, Any]) -> Any:
    replaced = window.replaced_tensors()
    if replaced:
        return functional_call(window.model, replaced, (), inputs, tie_weights=False)
    return _call(window, window.model, inputs)


def run_body(
    window: CausalLMWindow, body: Callable[..., Any] | None, inputs: dict[str, Any]
) -> Tensor:
    """States `[R, W, C]` after the last norm, by the fused decoder or the headless `body`."""
    chosen = window.forwards
    decoder = chosen.decoder
    if chosen.same_bits and chosen.this is not None:
        chosen.same_bits = chosen.this.same_bits and not window.methods
    if decoder is None:
        assert body is not None
        states: Tensor = _call(window, body, inputs).last_hidden_state
        return states
    embedded = inputs.get("inputs_embeds")
    if embedded is None:
        embedded = decoder.embed(inputs["input_ids"])
    prompt = window.own_prompt
    tables = window.tables if prompt is None or prompt.is_plain else None
    kept: dict[int, Tensor] = {}  # what these layers read, which the decoder fills in
    if window.keeps_states:
        kept = dict.fromkeys(window.kept_layers, torch.empty(0, dtype=torch.float32))
    hidden = decoder.forward(
        embedded, inputs["position_ids"], inputs["attention_mask"], window.run_caches().layers,
        chosen.this, chosen.compiled, tables, kept,
    )  # fmt: skip
    if chosen.compiled is not None and chosen.compiled.ran:
        chosen.name = "compiled"
    if window.keeps_states:
        kept[window.n_layers] = hidden
        states_of_layers = [kept[layer] for layer in window.kept_layers]
        window.last_states = torch.cat(states_of_layers or [hidden], -1)
    return hidden


def _call(window: CausalLMWindow, module: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    entries = inputs["input_ids" if "input_ids" in inputs else "inputs_embeds"]
    with own_products(window.forwards.own, entries):
        return module(**inputs)


@contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """Inside the block, masked attention does not run in cuDNN, which plans every shape anew."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def describe_route(window: CausalLMWindow) -> Route:
    chosen = window.forwards
    activations = find_activations(window.model)
    return Route(
        chosen.name,
        chosen.reason,
        window.attention_reason,
        "" if activations is None else activations.format,
        chosen.same_bits,
        describe_sharing(window.model),
    )


def close_forwards(model: Any, *, forget: bool = True) -> None:
    """Give a model's parameters storages of their own, and drop copies."""
    close_own_products(model)
    close_fused(model, forget=forget)
