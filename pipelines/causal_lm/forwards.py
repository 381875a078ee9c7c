"""ForwardRoute: the forward of a window's passes, the model's own or the fused decoder's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.causal_lm.caches import LayerCaches
from mmaccel.pipelines.causal_lm.compatibility import check_mode
from mmaccel.pipelines.causal_lm.self_check import check_fused, find_other_bits
from mmaccel.pipelines.layers.attention import WindowPass, window_attention_in
from mmaccel.pipelines.layers.attention_inputs import find_attending
from mmaccel.pipelines.layers.attention_name import find_configs
from mmaccel.pipelines.runner.compiled_passes import CompiledRun
from mmaccel.pipelines.runner.fused_decoder import FusedDecoder, close_fused, open_fused
from mmaccel.pipelines.runner.own_products import (
    OwnProducts,
    close_own_products,
    open_own_products,
    own_products,
)

if TYPE_CHECKING:
    from mmaccel.pipelines.causal_lm.model import CausalLMWindow


class ForwardRoute:
    """Carries out the forwards of a causal LM, by the route that a run has chosen.

    Args:
        model: the model.
        windows: of each layer.

    Attributes:
        decoder: the fused decoder of the run; None: the model's own forward.
        name, reason: see `mmaccel.contracts.Route`.
        same_bits: whether the passes of the run so far had the same bits at any width and batch.
    """

    def __init__(self, model: Any, windows: Sequence[int | None]) -> None:
        self.decoder: FusedDecoder | None = None
        self.name = "model"
        self.reason = "no run has begun"
        self.same_bits = False
        self._model = model
        self._own: OwnProducts | None = None  # of the model's own forward
        self._windows = windows
        self._compiled: CompiledRun | None = None
        self._pass: WindowPass | None = None  # the one that runs now, of the fused decoder
        self._configs: list[Any] = []  # in which the model's layers look up their attention
        self._attending: list[nn.Module] = []  # of the model, where hidden states are read

    def choose(self, window: CausalLMWindow) -> None:
        """Choose the route of a window's next run."""
        fused = window.setup.fused
        compile = False if fused == "exact" else window.setup.compile
        self._configs = []
        self._attending = []
        self.decoder = None
        self._own = None
        self.reason = _find_obstacle(window)
        if not self.reason and isinstance(fused, FusedDecoder):
            self.decoder = fused
        elif not self.reason:
            self.decoder, self.reason = self._open_decoder(window)
            option, value = ("compile", True) if compile is True else ("fused", fused)
            if value in (True, "exact") and self.decoder is None:
                raise UnsupportedModelError(
                    f"{option}={value!r}: expected a model that the fused decoder serves, received "
                    f"a {type(self._model).__name__} with {self.reason}; set {option}='auto'"
                )
            if self.decoder is None:
                self._own = open_own_products(self._model)
        self.same_bits = fused == "exact" and self.decoder is not None
        self.name = "model" if self.decoder is None else "fused"
        served = self.decoder or self._own
        if served is not None and served.products.reordered_bytes:
            copied = f"{served.products.reordered_bytes >> 20} MB of weights once more for oneDNN"
            self.reason = f"{self.reason}; {copied}" if self.reason else copied
        self._compiled = (
            None if self.decoder is None else CompiledRun(self.decoder.compiled, compile)
        )

    def _open_decoder(self, window: CausalLMWindow) -> tuple[FusedDecoder | None, str]:
        """The fused decoder of the model, or None and why not."""
        check_mode(self._model)  # a self-check needs it
        found, reason = open_fused(
            self._model, self._windows, lambda decoder: check_fused(window.plain(), decoder)
        )
        if found is not None:
            found.use_same_bits(window.setup.fused == "exact")
        if found is not None and window.setup.fused == "exact":
            reason = find_other_bits(window.plain(), found)
            found = None if reason else found
        if found is not None and found.head is None and window.needs_head:
            return None, found.head_reason
        return found, reason

    @contextmanager
    def attending(self, this: WindowPass) -> Iterator[None]:
        """Inside the block, the layers attend as a pass says."""
        if self.decoder is None:
            self._configs = self._configs or find_configs(self._model)
            if this.reads_hidden:
                self._attending = self._attending or find_attending(self._model)
            with window_attention_in(self._configs, this, self._attending):
                yield
        else:
            self._pass = this
            try:
                yield
            finally:  # a prompt after a pass that failed is processed under masks
                self._pass = None

    def run_model(self, inputs: dict[str, Any], replaced: dict[str, Tensor]) -> Any:
        """The model's own forward, with other parameters and buffers in place of some, by name."""
        if replaced:
            return functional_call(self._model, replaced, (), inputs, tie_weights=False)
        return self._call(self._model, inputs)

    def _call(self, module: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        entries = inputs["input_ids" if "input_ids" in inputs else "inputs_embeds"]
        with own_products(self._own, entries):
            return module(**inputs)

    def states(
        self,
        body: Callable[..., Any] | None,
        inputs: dict[str, Any],
        caches: LayerCaches,
        *,
        counts_tokens: bool,
        kept: dict[int, Tensor],
    ) -> Tensor:
        """Hidden states `[R, W, C]` after the last norm: the fused decoder's, else `body`'s.

        Args:
            body: the model without its head.
            inputs: of its forward.
            counts_tokens: whether positions count the tokens.
            kept: receives the inputs `[R, W, C]` of the fused decoder's layers, by number.
        """
        decoder = self.decoder
        self.same_bits &= self._pass is None
        if decoder is None:
            assert body is not None
            states: Tensor = self._call(body, inputs).last_hidden_state
            return states
        embedded = inputs.get("inputs_embeds")
        hidden = decoder.forward(
            decoder.embed(inputs["input_ids"]) if embedded is None else embedded,
            inputs["position_ids"], inputs["attention_mask"], caches.layers, self._pass,
            self._compiled, caches.tables if counts_tokens else None, kept,
        )  # fmt: skip
        if self._compiled is not None and self._compiled.ran:
            self.name = "compiled"
        return hidden


def close_forwards(model: Any, *, forget: bool = True) -> None:
    """Give a model's parameters storages of their own, and drop copies; see `close_fused`."""
    close_own_products(model)
    close_fused(model, forget=forget)


def _find_obstacle(window: CausalLMWindow) -> str:
    """What about a run needs the model's own forward; empty where nothing does."""
    if window.setup.fused is False:
        return "fused=False"
    if window.pass_options:
        return f"the call asks for {', '.join(window.pass_options)}"
    obstacle = "" if window.own_prompt is None else window.own_prompt.fused_obstacle
    kind = window.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return obstacle or ("autocast is on" if is_cast else "")


class OutputHead:
    """The head of a model, of which maybe some rows alone are computed.

    Args:
        model: the model.
        vocab_size: V, of the first rows.
        n_ids: of the whole head.
    """

    def __init__(self, model: Any, vocab_size: int, n_ids: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._narrow: str | None = None  # name of a head of which only V rows are computed
        head = model.get_output_embeddings()
        has_hook = getattr(head, "_hf_hook", None) is not None  # which brings the whole head
        if vocab_size < n_ids and isinstance(head, nn.Linear) and not has_hook:
            self._narrow = next(name for name, m in model.named_modules() if m is head)

    def replaced_tensors(self) -> dict[str, Tensor]:
        """Weight and bias of the rows that are computed, by full name; empty for all rows."""
        if self._narrow is None:
            return {}
        head = self._model.get_submodule(self._narrow)
        replaced = {f"{self._narrow}.weight": head.weight[: self._vocab_size]}
        if head.bias is not None:
            replaced[f"{self._narrow}.bias"] = head.bias[: self._vocab_size]
        return replaced
