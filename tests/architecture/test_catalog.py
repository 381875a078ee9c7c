"""Short names: every entry builds, presets hold, an option that a policy lacks is refused."""

from __future__ import annotations

import pytest

import mmaccel
from mmaccel.catalog import MODELS, POLICIES, REDUCERS, make, make_policy, policy_names
from mmaccel.samplers.window.jacobi import Jacobi
from mmaccel.samplers.window.speculative_jacobi import SpeculativeJacobi

_GUARANTEES = {  # of the names that users have written down
    "autoregressive": "bitwise",
    "jacobi": "bitwise",
    "sjd": "distribution",
    "mc-sjd": "distribution",
    "gumbel-sjd": "distribution",
    "speculative": "distribution",
    "prompt-lookup": "distribution",
    "gsd": "relaxed",
    "pcg": "relaxed",
    "stepwise": "bitwise",
    "lossless-unmask": "bitwise",
    "entropy-bounded": "relaxed",
    "confident-parallel": "relaxed",
    "kl-stable": "relaxed",
    "local-leap": "relaxed",
    "adaptive-block": "relaxed",
    "revised-parallel": "relaxed",
    "masked-parallel": "relaxed",
    "layered-parallel": "relaxed",
    "explore-exploit": "relaxed",
    "learned-filter": "relaxed",
}


def test_names_stay_in_their_order() -> None:
    names = [*policy_names(), *policy_names("canvas")]
    assert [name for name in names if name in _GUARANTEES] == list(_GUARANTEES)
    assert list(MODELS) == ["scenes", "scenes-masked", "scenes-var"]


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_name_builds(name: str) -> None:
    policy = make_policy(name)
    assert type(policy).__name__ == POLICIES[name].target.split(":")[1]
    assert policy.exactness == _GUARANTEES.get(name, policy.exactness)


def test_options_reach_the_policy() -> None:
    assert make_policy("jacobi", window=7, drafts="left") == Jacobi(window=7, drafts="left")


@pytest.mark.parametrize(
    ("name", "coupling"), [("sjd", "independent"), ("mc-sjd", "maximal"), ("gumbel-sjd", "gumbel")]
)
def test_a_short_name_presets_the_coupling(name: str, coupling: str) -> None:
    assert make_policy(name, window=5) == SpeculativeJacobi(window=5, coupling=coupling)


def test_every_method_for_visual_tokens_has_a_name() -> None:
    built = {type(make("visual_tokens", name, keep=0.5)).__name__ for name in REDUCERS}
    modules = {name: getattr(mmaccel, name).__module__ for name in mmaccel.__all__[1:]}
    public = {name for name, own in modules.items() if ".reduction.visual_tokens." in own}
    assert built == public and len(built) == len(REDUCERS)
    assert make("visual_tokens", "dart", n_keep=7, layer=3) == mmaccel.DART(n_keep=7, layer=3)
