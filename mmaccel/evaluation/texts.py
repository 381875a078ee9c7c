"""Texts that a causal LM continues, for `evaluate exactness` and `evaluate speed`."""

from __future__ import annotations

import fnmatch
import inspect
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from torch import Tensor

from mmaccel.config_files import read_json
from mmaccel.contracts import Prompt
from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.hosts.causal_lm.self_check import check_windows
from mmaccel.pipelines.hosts.loading.checkpoint import LoadConfig, check_prompt, load_causal_lm
from mmaccel.pipelines.hosts.loading.tasks import check_task
from mmaccel.pipelines.hosts.runner.engine import Engine
from mmaccel.pipelines.text_to_image.model import PromptedModel
from mmaccel.pipelines.text_to_image.pipeline import TextToImage
from mmaccel.pipelines.text_to_image.registry import find_image_family, find_source
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.grid import Grid


class ContinuedTexts(PromptedModel):
    """A causal LM with its tokenizer: what follows a prompt, up to an end that the model makes.

    Of its `generate`'s settings only ends and truncation stay: all sides draw alike.
    """

    family = "a language model"
    no_guidance = "a language model is not guided here"

    def __init__(self, model: Any, tokenizer: Any, length: int) -> None:
        from transformers import GenerationConfig

        window = CausalLMWindow(model)
        check_windows(model, window)
        super().__init__(window, Grid(1, length, window.vocab_size), (0, 0))
        self.tokenizer = tokenizer
        self.examples = tuple(chain(*islice(zip(*list_texts().values()), 2)))
        settings = model.generation_config
        self.params = SamplingParams(temperature=0.0)
        if settings.do_sample:
            self.params = SamplingParams(
                temperature=settings.temperature or 1.0,
                top_k=settings.top_k or None,
                top_p=settings.top_p,
                min_p=settings.min_p,
            )
        ends = settings.eos_token_id
        self.ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=self.pad)

    def encode(self, text: str) -> list[int]:
        return encode_text(self.tokenizer, check_prompt(text))

    def begin(self, prompt: Prompt) -> Prompt:
        stops = prompt.tokens.new_tensor(self.ends) if self.ends else None
        return replace(prompt, layout=None, stop_tokens=stops)

    def render(self, tokens: Tensor, prompts: Sequence[str], seeds: Sequence[int]) -> list[str]:
        texts: list[str] = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return texts


def find_causal_lm(name: str, load_config: LoadConfig) -> Path | None:
    """The folder of a causal LM of transformers; None for a model of images."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    check_task(name, "generate")
    source = find_source(name, load_config)
    check_task(source, "generate")
    try:
        find_image_family(source, name)
    except UnsupportedModelError as error:
        file = source / "config.json"
        config = read_json(file, may_lack=True)
        own_code = config.get("auto_map")
        is_own = isinstance(own_code, Mapping) and "AutoModelForCausalLM" in own_code
        if is_own or config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return source
        raise UnsupportedModelError(
            f"{error}; or give a causal LM of transformers, as save_pretrained wrote it"
        ) from error
    return None


def open_texts(source: Path, engine: Engine, load_config: LoadConfig, length: int) -> TextToImage:
    """A causal LM whose `stream` decodes texts as that of a model of images decodes images."""
    model, tokenizer = load_causal_lm(source, load_config)
    return TextToImage(ContinuedTexts(model, tokenizer, length), source, engine)


def list_texts() -> dict[str, list[str]]:
    """Three prompts of each of four kinds, about texts of Python's own."""
    from pydoc_data.topics import topics

    functions: list[Callable[..., Any]] = [textwrap.indent, fnmatch.filter, textwrap.dedent]
    pages = [" ".join(topics[name].split())[:1800] for name in ("booleans", "with", "lambda")]
    change = "Repeat this function, with the name changed to `changed`:\n\n```python\n"
    return {
        "copy": [f"{change}{inspect.getsource(each)}```" for each in functions],
        "code": [
            f"Continue this module:\n\n```python\n{inspect.getsource(module)[:1800]}"
            for module in (textwrap, fnmatch, shlex)
        ],
        "summary": [
            f"Summarise this text and quote its most important phrases:\n\n{page}" for page in pages
        ],
        "prose": [
            "Write a story about a lighthouse keeper who finds a message in a bottle.",
            "Explain to a child why the sky is blue and sunsets are red.",
            "What should somebody consider who moves from a small town to a large city?",
        ],
    }


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """The ids of a prompt, in the tokenizer's chat template where it has one."""
    if tokenizer.chat_template is None:
        ids: list[int] = tokenizer(f"{text}\n", verbose=False)["input_ids"]
        return ids
    turns = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(
        turns,
        add_generation_prompt=True,
        return_dict=True,
        tokenizer_kwargs={"verbose": False},  # on lengths, which are checked later
    )
    return list(encoded["input_ids"])
