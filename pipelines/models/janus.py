"""Janus: image tokens have their own embedding table and head.

X. Chen et al., "Janus-Pro", 2025 (arXiv 2501.17811), as transformers'
`JanusForConditionalGeneration`, whose `generate(generation_mode="image")` is a loop of its own:
rows doubled for guidance, `generation_embeddings`, `generation_head`. The library prepares a call
up to its first pass. The model's authors use temperature 1, guidance 5 and all tokens.

Departures: the library passes only the prompt to its logits processors, never the generated tokens.
A call with a processor that reads the prefix therefore runs the original loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from math import isqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.errors import MMAccelError, UnsupportedModelError
from mmaccel.pipelines.hosts.causal_lm.family import CausalLM
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow, select_kept
from mmaccel.pipelines.hosts.causal_lm.route import run_body
from mmaccel.pipelines.hosts.generate_call import (
    Table,
    Task,
    align_left,
    find_in_model,
    hand_over,
    is_left_padded,
)
from mmaccel.pipelines.hosts.loading.checkpoint import (
    LoadConfig,
    check_prompt,
    check_size,
    load_model,
    load_processor,
)
from mmaccel.pipelines.hosts.loading.moving import ready
from mmaccel.pipelines.hosts.logits.processor_chain import LogitsChain, take_warpers
from mmaccel.pipelines.hosts.logits.processor_support import find_kind, is_own
from mmaccel.pipelines.hosts.original_methods import original
from mmaccel.pipelines.hosts.transformers_release import CACHE, find_cache
from mmaccel.pipelines.hosts.vision_language.family import VisionLanguage
from mmaccel.pipelines.text_to_image.model import ImageModel, restore_pixels
from mmaccel.results import Generation
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.grid import Grid

_GUIDANCE_PROCESSOR = "ClassifierFreeGuidanceLogitsProcessor"
_GUIDANCE = 5.0
_RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_REPLACED = ("_get_logits_processor", "prepare_inputs_for_generation")
_PASSED = {"inputs_embeds", "is_first_iteration", "use_cache", "guidance_scale", "logits_to_keep"}


class Janus(CausalLM):
    """`JanusForConditionalGeneration`: text as any causal LM, images by their own loop."""

    name: ClassVar[str] = "janus"
    arguments: ClassVar[Table] = VisionLanguage.arguments
    placeholders = VisionLanguage.placeholders

    def own_loop(self, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Task | None:
        if options.get("generation_mode", "text") == "text":
            return None
        try:
            self.check(model)
        except UnsupportedModelError as error:
            return Task([str(error)])
        seen = prepare_image(model, args, options)
        config = seen.config
        processors = list(seen.processors)
        reasons = [name for name in _RECORDS if getattr(config, name, False)]
        reasons += [*find_in_model(model), *seen.others]
        if not is_left_padded(seen.mask):
            reasons.append("an attention mask that does more than hide padding on the left")
        if find_cache(options) is not None:
            reasons.append("a cache given by the caller")
        if not processors or not is_own(processors[0], _GUIDANCE_PROCESSOR):
            reasons.append("guidance that does not come first")
        kinds = [(processor, find_kind(processor)) for processor in processors[1:]]
        for processor, kind in kinds:
            if kind != "flat":
                name = type(processor).__name__
                reasons.append(f"a {name}, to which Janus passes the prompt alone")
        length = model.model.vision_model.config.num_image_tokens
        longest = seen.tokens.shape[1]
        limit = model.config.text_config.max_position_embeddings
        if longest + length - 1 > limit:
            reasons.append(f"more positions than the model's {limit}")
        if reasons:
            return Task(reasons)
        kinds, warpers = take_warpers(kinds, config.do_sample)
        chain = LogitsChain(kinds, seen.ids, longest) if kinds else None
        prompt = Prompt(align_left(seen.tokens, seen.mask), seen.mask.sum(1), branches=2)
        scale = float(processors[0].guidance_scale)
        temperature = 1.0 if config.do_sample else 0.0

        def hand_on(generation: Generation) -> Any:
            nothing = seen.ids[:, :0]  # the library returns codes without the prompt
            return hand_over(nothing, generation, None, config.return_dict_in_generate)

        return Task(
            model=JanusCodes(model, prompt.lengths),
            prompt=prompt,
            length=length,
            params=SamplingParams(
                scale, **{"temperature": temperature, "processor": chain} | warpers
            ),
            samples=config.do_sample,
            hand_over=hand_on,
        )


class JanusCodes(CausalLMWindow):
    """Janus as a token model: text ids in a row's prompt, image codes after it."""

    own_vocabulary = True
    row_inputs = ("_lengths",)
    follows_tokens = True  # in a prompt all tokens are before its length
    needs_head = False

    def __init__(self, model: Any, lengths: Tensor | None = None) -> None:
        super().__init__(model)
        self.vocab_size = model.model.vqmodel.config.num_embeddings
        self._lengths = lengths

    def output_head(self) -> Any:
        return self.model.model.generation_head.vision_head

    def begin(self, prompt: Prompt) -> Prompt:
        self._lengths = prompt.lengths
        return prompt

    def compute(self, **inputs: Any) -> Any:
        assert self._lengths is not None, "begin comes first"
        tokens = inputs.pop("input_ids")
        inner = self.model.model
        is_text = inputs["position_ids"] < self._lengths.view(len(tokens), -1)  # [R, W]
        codes = tokens.masked_fill(is_text, 0)
        embedded = torch.where(
            is_text[..., None],
            self.model.get_input_embeddings()(tokens.masked_fill(~is_text, 0)),
            self.model.prepare_embeddings_for_image_generation(codes),
        )
        kept = inputs.pop("logits_to_keep", 0)
        inputs["inputs_embeds"] = embedded
        hidden = select_kept(run_body(self, inner.language_model, inputs), kept)
        return SimpleNamespace(logits=inner.generation_head(hidden))


class _Prepared(MMAccelError):
    """Raised at the library's first pass, to end its preparation of a call."""


def prepare_image(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> SimpleNamespace:
    """The library's own preparation of a call, up to its first pass: config, processors, others
    (names of further arguments of a pass), ids `[B, T]` as given, tokens `[2 B, T]` with the
    rows for guidance, and their mask, bool. The caller's lists are copied.
    """
    from transformers import DynamicCache

    seen = SimpleNamespace()
    make = model._get_logits_processor

    def note_processors(generation_config: Any, **others: Any) -> Any:
        seen.config = generation_config
        seen.ids = others["encoder_input_ids"]
        seen.processors = make(generation_config=generation_config, **others)
        return seen.processors

    def stop(  # the library reads these names to find the arguments that it may pass
        input_ids: Tensor, attention_mask: Tensor, **kwargs: Any
    ) -> Any:
        given = {name for name, value in kwargs.items() if value is not None} - {CACHE}
        seen.others = sorted(given - _PASSED)
        seen.tokens = input_ids
        seen.mask = attention_mask.bool()
        raise _Prepared

    lists = [copy(value) if isinstance(value, list) else value for value in args]
    named = {k: copy(v) if isinstance(v, list) else v for k, v in options.items()}
    before = {name: vars(model)[name] for name in _REPLACED if name in vars(model)}
    model._get_logits_processor, model.prepare_inputs_for_generation = note_processors, stop
    try:
        # A given cache keeps the library from creating one, which transformers 5.17 cannot.
        original(model, "generate")(*lists, **{**named, CACHE: DynamicCache()})
    except _Prepared:
        pass
    finally:
        del model._get_logits_processor, model.prepare_inputs_for_generation
        vars(model).update(before)
    seen.ids = seen.tokens[: seen.tokens.shape[0] // 2]
    return seen


class JanusImages(ImageModel):
    """`JanusForConditionalGeneration` and its processor as an `ImageModel` of one size."""

    family = "Janus"
    no_negatives = "whose authors use padding instead of words in the unconditional row"
    params = SamplingParams(guidance_scale=_GUIDANCE)
    window: JanusCodes

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor
        window = JanusCodes(model)
        shape = model.model.vision_model.config
        side = isqrt(shape.num_image_tokens)
        layout = Grid(side, side, window.vocab_size)
        super().__init__(window, layout, (shape.image_size, shape.image_size))

    def encode(self, text: str) -> list[int]:
        """Ids of the prompt as a user message, and of the token before an image."""
        content = [{"type": "text", "text": check_prompt(text, self.processor.tokenizer)}]
        chat = [{"role": "user", "content": content}]
        texts = self.processor.apply_chat_template(
            [chat], tokenize=False, add_generation_prompt=True
        )
        encoded = self.processor(text=texts, generation_mode="image", return_tensors="pt")
        ids: list[int] = encoded["input_ids"][0].tolist()
        return ids

    def make_prompt(self, encoded: Sequence[list[int]], guided: bool, negatives: Any) -> Prompt:
        """The library builds the unconditional rows."""
        longest = max(map(len, encoded))
        padded = [[0] * (longest - len(row)) + row for row in encoded]
        is_real = [[0] * (longest - len(row)) + [1] * len(row) for row in encoded]
        ids = torch.tensor(padded, device=ready(self.model), dtype=torch.int64)
        options = {
            "input_ids": ids,
            "attention_mask": ids.new_tensor(is_real),
            "generation_mode": "image",
            "guidance_scale": _GUIDANCE,  # any: the rows do not depend on it
        }
        seen = prepare_image(self.model, (), options)
        rows = slice(None if guided else len(encoded))
        tokens = seen.tokens[rows]
        mask = seen.mask[rows]
        branches = 2 if guided else 1
        return self.window.begin(
            Prompt(align_left(tokens, mask), mask.sum(1), branches, layout=self.layout)
        )

    def decode(self, tokens: Tensor) -> Tensor:
        ready(self.model)
        pixels = self.model.decode_image_tokens(tokens).permute(0, 3, 1, 2)
        return restore_pixels(pixels, self.processor.image_processor)


def load_janus(folder: Path, load_config: LoadConfig) -> JanusImages:
    """Load a checkpoint such as deepseek-community/Janus-Pro-1B."""
    from transformers import JanusForConditionalGeneration, JanusProcessor

    processor = load_processor(JanusProcessor, folder, load_config)
    if processor.chat_template is None:
        raise UnsupportedModelError(
            f"model: expected a chat template in {folder}, received none; copy chat_template.jinja "
            "or chat_template.json too"
        )
    model = load_model(JanusForConditionalGeneration, folder, load_config)
    side = model.model.vision_model.config.image_size
    check_size(load_config.size, (side, side))
    if not hasattr(model.generation_config, "generation_kwargs"):  # no generation_config
        opening = processor.tokenizer.convert_tokens_to_ids(processor.image_start_token)
        model.generation_config.generation_kwargs = {"boi_token_id": opening}
    Janus().check(model)
    images = JanusImages(model, processor)
    images.prompt([images.encode("a")], guided=True)  # by the library's code and files
    return images
