"""A policy for one call: what `generate(custom_generate=...)` takes, with nothing attached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from mmaccel.checks import check_choice
from mmaccel.contracts import Layout
from mmaccel.errors import AttachError
from mmaccel.pipelines.hosts.attach.attaching import choose_policy, family_of
from mmaccel.pipelines.hosts.attach.generate import AttachOptions, GenerateService
from mmaccel.pipelines.hosts.attach.layout_processor import check_layout, count_ids
from mmaccel.pipelines.hosts.causal_lm.family import CausalLM
from mmaccel.pipelines.hosts.runner.engine import Engine, UseGraphs
from mmaccel.policies import Policy
from mmaccel.samplers.noise import check_seed, choose_seed


class Decoder(GenerateService):
    """A decoding loop for `custom_generate`; `decoder` makes one."""

    @property
    def engine(self) -> Engine:
        return self.options.engine

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **others: Any,
    ) -> Any:
        """What transformers calls instead of its own loop; AttachError for beams or another
        search.
        """
        mode = str(getattr(generation_config.get_generation_mode(), "value", ""))
        if mode not in ("greedy_search", "sample"):
            raise AttachError(
                f"custom_generate: expected greedy search or sampling, received {mode}; leave "
                "custom_generate out of such a call"
            )
        check_layout(self.options.layout, count_ids(model))
        service = replace(self, family=family_of(model), coarse_drafts={})
        return service.sample(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **others
        )


def decoder(
    policy: Policy | str,
    *,
    seed: int | Sequence[int | None] | None = None,
    strict: bool = False,
    layout: Layout | None = None,
    cuda_graphs: UseGraphs = "auto",
    sync_every: int = 1,
    assume_stateless: bool = False,
) -> Decoder:
    """A policy as an argument of one call: `model.generate(..., custom_generate=decoder(policy))`.

    transformers passes neither `synced_gpus` nor its streamer, which gets the prompt and no end:
    use `attach` with one. Models with a `generate` of their own (Janus for images) ignore the
    argument or refuse it. The loop has `stats` and `history`, and serves many calls; see
    `mmaccel.attach`.
    """
    own_seed = None if check_seed(seed) is None else choose_seed(seed)
    check_choice("strict", strict, (True, False))
    check_choice("assume_stateless", assume_stateless, (True, False))
    engine = Engine(cuda_graphs, sync_every, fused=False)  # one call packs no weights
    chosen = choose_policy(policy, layout)
    options = AttachOptions(own_seed, strict, layout, engine, assume_stateless)
    return Decoder(chosen, CausalLM(), options)
