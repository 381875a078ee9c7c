"""A checkpoint's configuration cannot make transformers download compiled code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

import mmaccel
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, load_model
from mmaccel.pipelines.hosts.loading.refusal import check_folder
from tests.fixtures.tiny_lms import build_lm

KERNEL = "org/kernel"
REFUSED: list[dict[str, Any]] = [
    {"attn_implementation": KERNEL},
    {"attn_implementation": {"": "sdpa", "text_config": {"": KERNEL}}},
    {"_attn_implementation_internal": {"text_config": KERNEL}},
    {"_experts_implementation": "deepgemm"},
    {"parts": [{"attn_implementation": KERNEL}]},
    {"attn_implementation": "flash_attention_2"},
]
ALLOWED: list[dict[str, Any]] = [
    {"_attn_implementation": {"": "sdpa", "text_config": "flex_attention"}},
    {"experts_implementation": "grouped_mm", "text_config": {"experts_implementation": "eager"}},
]


def write(folder: Path, content: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize("content", REFUSED, ids=str)
def test_names_of_downloaded_code_are_refused(content: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, content)
    with pytest.raises(UnsupportedModelError, match="would download"):
        check_folder(tmp_path)


@pytest.mark.parametrize("content", ALLOWED, ids=str)
def test_names_that_transformers_has_are_not(content: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, content)
    check_folder(tmp_path)


def test_no_kernel_is_fetched_by_a_folder_and_any_by_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's name is refused; that transformers honours it shows when the user loads it."""
    fetched: list[str] = []

    def fetch(name: str, **_: Any) -> None:
        fetched.append(name)
        raise FileNotFoundError(name)

    monkeypatch.setattr("transformers.integrations.hub_kernels.is_kernels_available", lambda: True)
    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda: True)
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", fetch)
    build_lm("llama").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    write(tmp_path, content | {"attn_implementation": {"": KERNEL}})
    with pytest.raises(UnsupportedModelError, match="would download"):
        load_model(AutoModelForCausalLM, tmp_path, LoadConfig())
    with pytest.raises(UnsupportedModelError, match="folder: .* would download"):
        mmaccel.load_demo("recall", tmp_path)
    assert fetched == []
    config = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="error occurred while trying to load"):
        AutoModelForCausalLM.from_config(config)
    assert fetched == [KERNEL]
