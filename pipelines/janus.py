"""Janus: pictures from an embedding table and a head of their own, in a loop of its own.

Model: X. Chen et al., "Janus-Pro", 2025 (arXiv 2501.17811), as transformers'
`JanusForConditionalGeneration`. `generate(generation_mode="image")` doubles the rows for guidance,
feeds picture codes through `generation_embeddings` and reads `generation_head`; text mode is an
ordinary causal LM. The call is prepared by the library's own code, up to its first pass.

Departures: the library shows its logits processors the prompt alone, never the tokens made; those
that read a prefix therefore run the original.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmaccel.contracts import Prompt
from mmaccel.pipelines.call_obstacles import find_in_model, is_left_padded
from mmaccel.pipelines.causal_lm import CausalLM
from mmaccel.pipelines.generate_call import align_left
from mmaccel.pipelines.janus_call import prepare_picture
from mmaccel.pipelines.logits_chain import LogitsChain
from mmaccel.pipelines.native_warpers import take_warpers
from mmaccel.pipelines.own_loop import OwnLoop
from mmaccel.pipelines.processor_kinds import find_kind, is_own
from mmaccel.pipelines.window_model import CausalLMWindow
from mmaccel.results import Generation
from mmaccel.samplers.filters import Filters

_GUIDANCE = "ClassifierFreeGuidanceLogitsProcessor"
_RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class Janus(CausalLM):
    """`JanusForConditionalGeneration`: text as any causal LM, pictures by a loop of its own."""

    name: ClassVar[str] = "janus"

    def own_loop(
        self, model: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> OwnLoop | None:
        """The call as a task, if it asks for pictures."""
        if options.get("generation_mode", "text") == "text":
            return None
        seen = prepare_picture(model, args, options)
        config, processors = seen.config, list(seen.processors)
        reasons = [name for name in _RECORDS if getattr(config, name, False)]
        reasons += [*find_in_model(model), *seen.others]
        if not is_left_padded(seen.mask):
            reasons.append("an attention mask that does more than hide padding on the left")
        if options.get("past_key_values") is not None:
            reasons.append("past_key_values given by the caller")
        if not processors or not is_own(processors[0], _GUIDANCE):
            reasons.append("guidance that does not come first")
        blank = torch.zeros(seen.ids.shape[0], 1, device=seen.ids.device)
        kinds = [(p, find_kind(p, seen.ids, blank)) for p in processors[1:]]
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
            filters=Filters(scale, **{"temperature": temperature, "processor": chain} | warpers),
            samples=config.do_sample,
            hand_over=hand_over,
        )


class JanusCodes(CausalLMWindow):
    """Text ids up to a row's prompt, picture codes behind it; logits of picture codes.

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


def _wrap(tokens: Tensor, config: Any) -> Any:
    if not config.return_dict_in_generate:
        return tokens
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=tokens)  # type: ignore[arg-type]
