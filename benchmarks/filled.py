"""Windows over caches that are full of random keys and values: a prompt of that length takes long,
and what a step reads does not depend on what they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.layers.methods import LayerMethods
from mmaccel.pipelines.hosts.layers.observing import Observed, Observer
from mmaccel.samplers.window.step_runner import StepRunner


def fill(
    window: CausalLMWindow,
    methods: LayerMethods,
    rows: int,
    positions: int,
    room: int,
    runner: StepRunner | None = None,
) -> CausalLMWindow:
    """Let a window of a Llama hold prompts of random entries, of which methods have done what they
    do; what evicts looks at the last queries alone. Passes may have `room` positions behind them.
    """
    window.setup.runner = runner
    window.use_methods(methods)
    window.reserve(rows, positions + room)
    config: Any = window.model.config.get_text_config()
    query_heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    heads = config.num_key_value_heads
    device = window.device
    drawn = torch.Generator(device).manual_seed(0)

    def draw(n_heads: int, n_entries: int) -> Tensor:
        shape = (rows, n_heads, n_entries, width)
        return torch.randn(shape, generator=drawn, device=device, dtype=window.model.dtype)

    caches = window.run_caches()
    index = torch.arange(positions, device=device).expand(rows, -1)
    caches.layout.prepare(index, caches.layout.max_length)
    lengths = torch.full((rows,), positions, device=device)
    method = methods.evictor
    observer = None if method is None else Observer(method, lengths)
    for number, layer in enumerate(window.run_caches().layers):
        layer.update(draw(heads, positions), draw(heads, positions))
        if method is not None and observer is not None:
            asking = draw(query_heads, method.observed)
            observer.layers[number] = Observed(asking, width**-0.5, None)
    caches.end_prompt(lengths, observer)
    return window
