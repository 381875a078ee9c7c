"""Targets of `attach` that no loop of `generate` serves: some pipelines and models, denoisers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mmaccel.capabilities import Capable, explain, refuse
from mmaccel.catalog import DENOISER_SERVICE, PIPELINES, load
from mmaccel.checks import show
from mmaccel.contracts import Layout, lack_of_canvas
from mmaccel.errors import OptionError
from mmaccel.pipelines.attach.layout_processor import check_layout
from mmaccel.pipelines.attach.patching import Injection
from mmaccel.pipelines.diffusion_lm.llada2.block_cache import CachedBlocks
from mmaccel.pipelines.diffusion_lm.registry import find_denoiser, open_denoiser
from mmaccel.pipelines.layers.methods import LayerMethods
from mmaccel.pipelines.runner.engine import Engine
from mmaccel.policies import check_policy

_PACKAGES = ("diffusers", "transformers")
OWN_POLICIES = {"cached-blocks": CachedBlocks}
"""Policies of `LLaDA2Pipeline` alone, by short name."""


def find_pipeline(target: Any) -> str | None:
    """Name of an object's class in `PIPELINES`, or of a denoiser's family.

    None for any other target. For denoisers see `mmaccel.pipelines.diffusion_lm.registry`.
    """
    classes = [k for k in type(target).__mro__ if k.__module__.partition(".")[0] in _PACKAGES]
    own = next((k.__name__ for k in classes if k.__name__ in PIPELINES), None)
    return own or find_denoiser(target)


def pipeline_policies(target: Any, canvas: Sequence[str]) -> tuple[str, ...]:
    """Short names of the policies that can be attached to a target of `find_pipeline`.

    Args:
        target: the pipeline or denoiser.
        canvas: short names of all canvas policies.

    Raises:
        OptionError, UnsupportedModelError: a model that no denoiser can be made of.
    """
    name = find_pipeline(target)
    if name == "LLaDA2Pipeline":
        return (*OWN_POLICIES, *canvas)
    refused = "revised-parallel" if name == "AmusedPipeline" else "lossless-unmask"
    if name not in PIPELINES:
        model = open_denoiser(target)
        has_shadows = "kept entries" in model.offers and model.mask_token is not None
        refused = "" if has_shadows else "revised-parallel"
    return tuple(policy for policy in canvas if policy != refused)


def serve_pipeline(
    target: Any,
    policy: Any,
    seed: int | Sequence[int] | None,
    strict: bool,
    layout: Layout | None,
    engine: Engine,
    layer_methods: LayerMethods,
    read: Callable[[Any], Any],
) -> tuple[Any, Injection]:
    """Attach a policy to a pipeline or denoiser; see `mmaccel.attach`.

    Args:
        target: one that `find_pipeline` names.
        policy: as `mmaccel.attach` takes it.
        seed, strict, layout, engine: as `attach` takes them.
        layer_methods: of the target's layers.
        read: makes a policy of what `OWN_POLICIES` lacks: `mmaccel.catalog.read_policy`.

    Returns:
        The service, with `policy` and `history`, and the injection that attaches it.

    Raises:
        OptionError: no policy or layout, or one the pipeline cannot use.
        UnsupportedModelError: a model that no denoiser can be made of, or whose layers do not carry
            methods; True for `cuda_graphs`, `fused` or `share_prefix`; or a `prefill_chunk_size`.
        AttachError: the pipeline or its model has a policy already.
    """
    name = find_pipeline(target)
    refuse(explain(engine, CanvasHost(target)))
    engine.check(target.device)
    is_own = isinstance(policy, str) and policy in OWN_POLICIES
    policy = OWN_POLICIES[policy]() if is_own else read(policy)
    check_layout(layout)
    if isinstance(policy, CachedBlocks):
        _check_cached(policy, name, seed, layout)
    else:
        check_policy(policy, "canvas")
    serve = load(PIPELINES.get(name or "", DENOISER_SERVICE))
    served: tuple[Any, Injection] = serve(target, policy, seed, strict, layout, layer_methods)
    return served


class CanvasHost(Capable):
    """What is attached to, as a part of a run."""

    slot = "model"

    def __init__(self, model: Any) -> None:
        self.model = model

    def lack(self, word: str, part: Any = None) -> str:
        """See `mmaccel.capabilities.Capable`."""
        return lack_of_canvas(word)


def _check_cached(policy: CachedBlocks, name: str | None, seed: Any, layout: Any) -> None:
    if name != "LLaDA2Pipeline":
        raise OptionError(
            f"policy: expected one that fills a canvas for a {name}, received "
            f"{show(policy)}, which is LLaDA2Pipeline's; try EntropyBounded()"
        )
    for option, value in (("seed", seed), ("layout", layout)):
        if value is not None:
            raise OptionError(
                f"{option}: expected none with {policy!r}, received one; the pipeline draws its "
                "own tokens, give generator= to its call"
            )
