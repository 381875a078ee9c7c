"""One module knows what differs between releases of transformers."""

import importlib.metadata
import inspect
import runpy
import warnings
from pathlib import Path

import pytest
import transformers
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

import mmaccel
from mmaccel.pipelines.hosts import transformers_release as release

ROOT = Path(__file__).parents[2]
FOLDERS = ("mmaccel", "kernels", "samplers", "pipelines", "tokenizers_vq")


def test_no_other_module_asks_for_the_release() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    words = ("transformers.__version__", 'version("transformers")')
    asking = {p.name for p in files if any(w in p.read_text(encoding="utf-8") for w in words)}
    assert asking == {"transformers_release.py"}


def test_the_cache_has_the_name_that_the_installed_release_gives_it() -> None:
    assert transformers.__version__ == release.VERSION
    assert (
        release.CACHE in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    )
    assert release.CACHE in CausalLMOutputWithPast.__dataclass_fields__


def test_a_forward_of_either_name_is_asked() -> None:
    assert release.cache_argument(["input_ids", "cache"]) == "cache"
    assert release.cache_argument(["input_ids", "past_key_values"]) == "past_key_values"
    assert release.cache_argument(["input_ids"]) is None
    assert release.find_cache({"past_key_values": None, "cache": 3}) == 3
    assert release.find_cache({"past_key_values": 4}) == 4
    assert release.find_cache({}) is None
    for given in ({"cache": 3, "x": 1}, {"past_key_values": 3, "x": 1}):
        assert release.name_cache(given, ["inputs", "kwargs"]) == {release.CACHE: 3, "x": 1}
        assert release.name_cache(given, ["past_key_values"]) == {"past_key_values": 3, "x": 1}


@pytest.mark.parametrize("version", ["5.16.2", "4.57.0.dev0"])
def test_an_older_release_is_refused_at_import(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(mmaccel.UnsupportedModelError) as caught:
        runpy.run_path(release.__file__)
    assert f"expected 5.17 or newer, received {version}" in str(caught.value)


@pytest.mark.parametrize(
    "version, is_new", [("5.24.3", False), ("5.25.0.dev0", True), ("6.0", True)]
)
def test_a_release_that_was_not_tested_warns_once(
    version: str, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "VERSION", version)
    release.warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        release.warn_if_untested()
        release.warn_if_untested()
    release.warn_if_untested.cache_clear()
    assert [version in str(warning.message) for warning in caught] == [True] * is_new
