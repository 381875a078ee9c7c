"""Janus: images from an embedding table and a head of their own, in a loop of its own.

Model: X. Chen et al., "Janus-Pro", 2025 (arXiv 2501.17811), as transformers'
`JanusForConditionalGeneration`. `generate(generation_mode="image")` doubles the rows for guidance,
feeds image codes through `generation_embeddings` and reads `generation_head`; text mode is an
ordinary causal LM. A call is prepared by the library's own code, up to its first pass. The model's
authors draw at temperature 1 with guidance 5 and keep all tokens.

Departures: the library shows its logits processors the prompt alone, never the tokens made; those
that read a prefix therefore run the original.
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
from mmaccel.pipelines.attach.generate_call import (
    OwnLoop,
    align_left,
    find_in_model,
    is_left_padded,
)
from mmaccel.pipelines.attach.patching import original
from mmaccel.pipelines.causal_lm.family import CausalLM
from mmaccel.pipelines.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.loading.checkpoint import (
    LoadConfig,
    check_caption,
    check_size,
    load_model,
    load_processor,
)
from mmaccel.pipelines.logits.processor_chain import LogitsChain, take_warpers
from mmaccel.pipelines.logits.processor_support import find_kind, is_own
from mmaccel.pipelines.text_to_image.model import ImageModel
from mmaccel.results import Generation
from mmaccel.samplers.sampling_params import SamplingParams
from mmaccel.tokenizers_vq.grid import Grid

_GUIDANCE_PROCESSOR = "ClassifierFreeGuidanceLogitsProcessor"
_GUIDANCE = 5.0
_RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_REPLACED = ("_get_logits_processor", "prepare_inputs_for_generation")
_HEEDED = {"inputs_embeds", "is_first_iteration", "use_cache", "guidance_scale", "logits_to_keep"}


class Janus(CausalLM):
    """`JanusForConditionalGeneration`: text as any causal LM, images by a loop of its own."""

    name: ClassVar[str] = "janus"

    def own_loop(
        self, model: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> OwnLoop | None:
        """The call as a task, if it asks for images."""
        if options.get("generation_mode", "text") == "text":
            return None
        seen = prepare_image(model, args, options)
        config, processors = seen.config, list(seen.processors)
        reasons = [name for name in _RECORDS if getattr(config, name, False)]
        reasons += [*find_in_model(model), *seen.others]
        if not is_left_padded(seen.mask):
            reasons.append("an attention mask that does more than hide padding on the left")
        if options.get("past_key_values") is not None:
            reasons.append("past_key_values given by the caller")
        if not processors or not is_own(processors[0], _GUIDANCE_PROCESSOR):
            reasons.append("guidance that does not come first")
        kinds = [(p, find_kind(p)) for p in processors[1:]]
        reasons += [
            f"a {type(p).__name__}, which Janus shows the prompt alone"
            for p, kind in kinds
            if kind != "flat"
        ]
        length = model.model.vision_model.config.num_image_tokens
        longest, limit = seen.tokens.shape[1], model.config.text_config.max_position_embeddings
        if longest + length - 1 > limit:
            reasons.append(f"more positions than the model's {limit}")
        if reasons:
            return OwnLoop(reasons)
        kinds, warpers = take_warpers(kinds, config.do_sample)
        chain = LogitsChain(kinds, seen.ids, longest) if kinds else None
        prompt = Prompt(align_left(seen.tokens, seen.mask), seen.mask.sum(1), branches=2)
        scale, temperature = float(processors[0].guidance_scale), 1.0 if config.do_sample else 0.0

        def hand_over(made: Generation) -> Any:
            return _wrap(made.tokens.to(seen.ids.device), config)

        return OwnLoop(
            window=JanusCodes(model, prompt.lengths),
            prompt=prompt,
            length=length,
            params=SamplingParams(
                scale, **{"temperature": temperature, "processor": chain} | warpers
            ),
            samples=config.do_sample,
            hand_over=hand_over,
        )


def _wrap(tokens: Tensor, config: Any) -> Any:
    if not config.return_dict_in_generate:
        return tokens
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=tokens)  # type: ignore[arg-type]


class JanusCodes(CausalLMWindow):
    """Text ids up to a row's prompt, image codes after it; logits of image codes.

    Args:
        model: `JanusForConditionalGeneration`.
        lengths: `[R]` int64, of the prompts of the next run; `begin` sets them too.
    """

    row_inputs = ("_lengths",)

    def __init__(self, model: Any, lengths: Tensor | None = None) -> None:
        super().__init__(model)
        self.vocab_size = model.model.vqmodel.config.num_embeddings
        self._lengths = lengths

    def begin(self, prompt: Prompt) -> Prompt:
        """The next run is this prompt's; hands it back."""
        self._lengths = prompt.lengths
        return prompt

    def _run(self, **inputs: Any) -> Any:
        assert self._lengths is not None, "begin comes first"
        tokens, inner = inputs.pop("input_ids"), self.model.model
        is_text = inputs["position_ids"] < self._lengths[:, None]  # [R, W]
        codes = tokens.masked_fill(is_text, 0)
        embedded = torch.where(
            is_text[..., None],
            self.model.get_input_embeddings()(tokens.masked_fill(~is_text, 0)),
            self.model.prepare_embeddings_for_image_generation(codes),
        )
        n_kept = inputs.pop("logits_to_keep", 0)
        out = inner.language_model(inputs_embeds=embedded, **inputs)
        return SimpleNamespace(logits=inner.generation_head(out.last_hidden_state[:, -n_kept:]))


class _Prepared(MMAccelError):
    """Raised where the library would run its first pass."""


def prepare_image(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> SimpleNamespace:
    """What the library's own code makes of a call, up to its first pass.

    Lists are copied, as the library appends to the caller's.

    Returns:
        config, processors, others (names of arguments nobody heeds), ids `[B, T]` as they were
        given, tokens `[2 B, T]` with the rows for guidance, mask `[2 B, T]` bool.
    """
    from transformers import DynamicCache

    seen = SimpleNamespace()
    make = model._get_logits_processor

    def note_processors(generation_config: Any, **others: Any) -> Any:
        seen.config, seen.ids = generation_config, others["encoder_input_ids"]
        seen.processors = make(generation_config=generation_config, **others)
        return seen.processors

    def stop(  # the names tell the library which arguments it may pass on
        input_ids: Tensor, attention_mask: Tensor, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        given = {name for name, value in kwargs.items() if value is not None}
        seen.others = sorted(given - _HEEDED)
        seen.tokens, seen.mask = input_ids, attention_mask.bool()
        raise _Prepared

    lists = [copy(value) if isinstance(value, list) else value for value in args]
    named = {k: copy(v) if isinstance(v, list) else v for k, v in options.items()}
    before = {name: vars(model)[name] for name in _REPLACED if name in vars(model)}
    model._get_logits_processor, model.prepare_inputs_for_generation = note_processors, stop
    try:
        # with a cache at hand none is prepared: we need none, and 5.17 cannot
        original(model, "generate")(*lists, **{**named, "past_key_values": DynamicCache()})
    except _Prepared:
        pass
    finally:
        del model._get_logits_processor, model.prepare_inputs_for_generation
        vars(model).update(before)
    seen.ids = seen.tokens[: seen.tokens.shape[0] // 2]
    return seen


class JanusImages(ImageModel):
    """Janus as an `ImageModel`; it draws one size.

    Args:
        model: `JanusForConditionalGeneration`.
        processor: `JanusProcessor`.
    """

    family = "Janus"
    no_negatives = "whose authors guide away from padding in the place of the words"
    params = SamplingParams(guidance_scale=_GUIDANCE)
    window: JanusCodes

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor
        window, shape = JanusCodes(model), model.model.vision_model.config
        side = isqrt(shape.num_image_tokens)
        layout = Grid(side, side, window.vocab_size)
        super().__init__(window, layout, (shape.image_size, shape.image_size))

    def encode(self, caption: str) -> list[int]:
        """A prompt as a user's turn, and the token that opens an image."""
        said = [{"type": "text", "text": check_caption(caption, self.processor.tokenizer)}]
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": said}], add_generation_prompt=True
        )
        made = self.processor(text=[text], generation_mode="image", return_tensors="pt")
        ids: list[int] = made["input_ids"][0].tolist()
        return ids

    def make_prompt(self, encoded: Sequence[list[int]], guided: bool, negatives: Any) -> Prompt:
        """See `ImageModel.make_prompt`; the unconditional rows are the library's own."""
        longest = max(map(len, encoded))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in encoded])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in encoded])
        device = self.window.device
        given = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        options = {**given, "generation_mode": "image", "guidance_scale": _GUIDANCE}
        seen = prepare_image(self.model, (), options)  # rows do not depend on the scale
        rows = slice(None if guided else len(encoded))
        tokens, mask = seen.tokens[rows], seen.mask[rows]
        branches = 2 if guided else 1
        return self.window.begin(
            Prompt(align_left(tokens, mask), mask.sum(1), branches, layout=self.layout)
        )

    def decode(self, tokens: Tensor) -> Tensor:
        """See `ImageModel.decode`."""
        shown = self.processor.image_processor
        pixels = self.model.decode_image_tokens(tokens).float()  # [B, H, W, 3]
        mean, std = (pixels.new_tensor(v) for v in (shown.image_mean, shown.image_std))
        return (pixels * std + mean).permute(0, 3, 1, 2)


def load_janus(folder: Path, load_config: LoadConfig) -> JanusImages:
    """Load a checkpoint such as deepseek-community/Janus-Pro-1B.

    Raises:
        OptionError: another size than the model's.
        UnsupportedModelError: files that are missing or do not fit.
    """
    from transformers import JanusForConditionalGeneration, JanusProcessor

    processor = load_processor(JanusProcessor, folder)
    if processor.chat_template is None:
        raise UnsupportedModelError(
            f"model: expected a chat template in {folder}, received none; copy chat_template.jinja "
            "or chat_template.json too"
        )
    model = load_model(JanusForConditionalGeneration, folder, load_config)
    side = model.model.vision_model.config.image_size
    check_size(load_config, (side, side))
    if not hasattr(model.generation_config, "generation_kwargs"):  # lost where others fill in
        opening = processor.tokenizer.convert_tokens_to_ids(processor.image_start_token)
        model.generation_config.generation_kwargs = {"boi_token_id": opening}
    Janus().check(model)
    return JanusImages(model, processor)
