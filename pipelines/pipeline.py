"""What the pipelines of all modalities share: loading options, moving, one run at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from mmaccel.capabilities import explain, refuse
from mmaccel.contracts import ContinuousBatching, Denoiser, FinishedRow, Prompt, TokenModel
from mmaccel.errors import OptionError
from mmaccel.options import LoadOptions, PassKeywords, read_options
from mmaccel.pipelines.call_options import DecodingOptions, ServeOptions
from mmaccel.pipelines.hosts.attach.layer_methods import read_methods
from mmaccel.pipelines.hosts.layers.methods import LayerMethods, reducing
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig
from mmaccel.pipelines.hosts.loading.moving import (
    MovablePipeline,
    Part,
    describe,
    drop_computed,
    find_parts,
)
from mmaccel.pipelines.hosts.loading.placement import choose_placement
from mmaccel.pipelines.hosts.runner.engine import Engine, UseGraphs
from mmaccel.pipelines.media import Payload, RowPlan
from mmaccel.pipelines.text_to_image.model import pick_policy
from mmaccel.policies import OnCanvasStep
from mmaccel.results import Generation, OnStep, Stats


@dataclass(frozen=True)
class Decoding:
    """How a call decodes."""

    policy: Any  # of the model's kind
    methods: LayerMethods  # of the model's layers


def read_loading(
    keywords: Mapping[str, Any],
    *,
    size: tuple[int, int] | None = None,
    decoder: str | Path | None = None,
) -> tuple[Engine, LoadConfig]:
    """How passes are carried out, and how files are read, by fields of `LoadOptions`."""
    options = read_options(LoadOptions, "from_pretrained", keywords)
    engine = Engine(**{name: getattr(options, name) for name in PassKeywords.__annotations__})
    dtype = options.dtype if options.torch_dtype is None else options.torch_dtype
    device, dtype = choose_placement(options.device, dtype, options.device_map)
    engine.check(device)
    read: dict[str, Any] = {"device": device, "dtype": dtype, "size": size}
    read["decoder"] = Path(decoder) if isinstance(decoder, str) else decoder
    return engine, LoadConfig(**vars(options) | read)


class Pipeline(MovablePipeline):
    """Base of the pipelines whose model, of one cache and so of one run at a time, decodes rows.

    Args:
        host: the model with its layout, encoder and renderer; its `window` predicts tokens.
        source, codec: folders that it and its codec were loaded from, if known.
    """

    modality: ClassVar[str] = ""
    """How the names of hosts' classes end."""

    def __init__(
        self,
        host: Any,
        source: Path | None = None,
        engine: Engine | None = None,
        codec: Path | None = None,
    ) -> None:
        self.host = host
        self.source = source
        self.engine = engine or Engine()
        self.codec = codec

    @property
    def model(self) -> Any:
        model: TokenModel | Denoiser = self.host.window
        return model

    @property
    def size(self) -> tuple[int, int] | None:
        """Width and height of what is made in pixels; None where it has none."""
        return None

    def __repr__(self) -> str:
        kind = type(self.host).__name__.removesuffix(self.modality)
        pixels = "" if self.size is None else f", {self.size[0]}x{self.size[1]}"
        return f"{type(self).__name__}({kind}{pixels}{describe(self)})"

    def choose(self, options: DecodingOptions) -> Decoding:
        """How a call decodes: its policy, and the methods of the model's layers."""
        chosen = pick_policy(options.policy, self.model)
        methods = read_methods(options.kv_cache, options.attention)
        refuse(explain(chosen, methods, self.engine, self.model))
        return Decoding(chosen, methods)

    def decode_rows(
        self,
        decoding: Decoding,
        plan: RowPlan,
        *,
        finish: Callable[[FinishedRow], Payload | None],
        deliver: Callable[[Payload], None],
        on_step: OnStep | OnCanvasStep | None,
    ) -> Stats:
        """Decode the rows of a plan with continuous batching. The caller holds the model.

        Args:
            finish: makes the payload of one finished row; None where nobody wants it.
            deliver: called with every payload as soon as its row has finished. An exception from it
                ends the run and reaches the caller.

        Returns:
            Stats; `pixel_seconds` is the time in `finish`, `seconds` is without it and `deliver`.
        """
        methods = decoding.methods
        n_rows = plan.prompt.batch
        if methods and (plan.max_num_seqs < n_rows or plan.arrivals is not None):
            raise OptionError(
                f"{methods.slots}: expected rows that begin together, received {n_rows} of which "
                f"{plan.max_num_seqs} are decoded at a time; give batch_size={n_rows}, make them "
                f"in several calls, or leave {methods.slots} out"
            )
        finishing = delivering = 0.0

        def on_finish(row: FinishedRow) -> None:
            nonlocal finishing, delivering
            began = time.perf_counter()
            payload = finish(row)
            finished = time.perf_counter()
            finishing += finished - began
            if payload is not None:
                deliver(payload)
            delivering += time.perf_counter() - finished

        batching = ContinuousBatching(
            plan.max_num_seqs, on_finish, plan.arrivals, prefix_tree=plan.prefix_tree
        )
        plan = replace(plan, prompt=replace(plan.prompt, batching=batching))
        stats = self.sample(decoding, plan, on_step).stats
        stats.pixel_seconds = finishing
        stats.seconds -= finishing + delivering
        return stats

    def sample(
        self, decoding: Decoding, plan: RowPlan, on_step: OnStep | OnCanvasStep | None
    ) -> Generation:
        """Decode the rows of a plan together. The caller holds the model by `run_lock.alone`."""
        policy = decoding.policy
        prompt = plan.prompt
        params = plan.params
        with torch.no_grad(), reducing(self.model, decoding.methods, prompt.branches):
            self.engine.prepare(self.model, prompt, policy, params)
            generation: Generation = policy.sample(
                self.model, prompt, plan.length, params=params, noise=plan.noise, on_step=on_step
            )
        decoding.methods.record(generation.stats, self.model)
        return generation

    def make_room(self, prompt: Prompt, call: ServeOptions, length: int) -> Prompt:
        """A prompt with room for the longest that may join before `length` tokens, if there is."""
        limit = self.model.max_positions
        width = call.prompt_width if limit is None else min(call.prompt_width, limit - length + 1)
        room = width - prompt.tokens.shape[1]
        if call.arrivals is None or room <= 0:
            return prompt
        return replace(prompt, tokens=F.pad(prompt.tokens, (0, room)))

    def _parts(self) -> dict[str, Part]:
        return find_parts(self.host)

    def _moved(self) -> None:
        drop_computed(self.model)
        self.engine.close()

    @property
    def _cuda_graphs(self) -> UseGraphs:
        return self.engine.cuda_graphs

    @property
    def _lock(self) -> Any:
        return self.model
