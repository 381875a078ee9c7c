"""Targets of `attach` that no loop of `generate` serves: some pipelines and models, denoisers."""

from __future__ import annotations

from typing import Any

from mmaccel.capabilities import explain
from mmaccel.catalog import DENOISER_SERVICE, PIPELINES, load, policy_names, read_policy
from mmaccel.pipelines.hosts.diffusion_lm.llada2.block_cache import CachedBlocks
from mmaccel.pipelines.hosts.diffusion_lm.pipeline_service import PolicyService
from mmaccel.pipelines.hosts.diffusion_lm.registry import find_denoiser
from mmaccel.policies import check_policy

_PACKAGES = ("diffusers", "transformers")
OWN_POLICIES = {"cached-blocks": CachedBlocks}
"""Policies of `LLaDA2Pipeline` alone, by short name."""


def find_pipeline(target: Any) -> str | None:
    """Name of an object's class in `PIPELINES`, or of a denoiser's family."""
    classes = [cls for cls in type(target).__mro__ if cls.__module__.partition(".")[0] in _PACKAGES]
    name = next((cls.__name__ for cls in classes if cls.__name__ in PIPELINES), None)
    return name or find_denoiser(target)


def open_service(target: Any) -> PolicyService:
    """The service of a target that `find_pipeline` names, without a policy."""
    service: PolicyService = load(PIPELINES.get(find_pipeline(target) or "", DENOISER_SERVICE))(
        target
    )
    return service


def pipeline_policies(target: Any) -> tuple[str, ...]:
    """Short names of the policies that can be attached to a target of `find_pipeline`."""
    service = open_service(target)
    names = (*OWN_POLICIES, *policy_names("canvas"))
    return tuple(name for name in names if not explain(read_canvas_policy(name), service))


def read_canvas_policy(policy: Any) -> Any:
    if isinstance(policy, str) and policy in OWN_POLICIES:
        return OWN_POLICIES[policy]()
    if isinstance(policy, CachedBlocks):
        return policy
    policy = read_policy(policy)
    check_policy(policy, "canvas")
    return policy
