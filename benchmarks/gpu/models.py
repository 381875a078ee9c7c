"""Models of true size with random weights, built on the device that is measured.

Sizes come from the published configurations. Janus-Pro: `language_config` of
deepseek-ai/Janus-Pro-1B and -7B, with the head of 16384 image codes of `gen_head_config` in the
place of the text head, which makes no image (the inner layer of that head is left out).
Chameleon-7B and Emu3: the defaults of transformers' `ChameleonConfig` and `Emu3TextConfig`, which
are those of facebook/chameleon-7b and BAAI/Emu3-Gen-hf, with more positions, which no weight
belongs to.
GLM-Image: the defaults of `GlmImageTextConfig`, at the positions of text; its class's rotary
sections 8, 12 and 12 fill half of a head, so half of each is turned here. Image tokens of Chameleon
have the ids 4..8195, those of Emu3 the last 32768.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mmaccel.pipelines.hosts.causal_lm.image_vocabulary import ImageTokenWindow
from mmaccel.pipelines.hosts.causal_lm.model import CausalLMWindow
from mmaccel.pipelines.models.glm_image import GlmImageWindow

_SPREAD = 0.02


@dataclass(frozen=True)
class Size:
    """A model to measure.

    Attributes:
        config: arguments of the class's configuration; what is missing has its default.
        codes: ids of image tokens where they are a part of the vocabulary; None: all of it.
    """

    name: str
    kind: str
    config: dict[str, Any]
    codes: range | None = None


def _janus(width: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return dict(
        vocab_size=16_384,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=16_384,
    )


def _glm_image(sections: list[int]) -> dict[str, Any]:
    rope = dict(
        rope_type="default",
        rope_theta=10_000.0,
        partial_rotary_factor=0.5,
        mrope_section=sections,
    )
    return {"rope_parameters": rope}


_LONG = {"max_position_embeddings": 16_384}
SIZES = (
    Size("Janus-Pro-1B", "LlamaForCausalLM", _janus(2048, 5632, 24, 16)),
    Size("Janus-Pro-7B", "LlamaForCausalLM", _janus(4096, 11_008, 30, 32)),
    Size("Chameleon-7B", "ChameleonForConditionalGeneration", _LONG, range(4, 8196)),
    Size("Emu3-8B", "Emu3ForCausalLM", _LONG, range(151_854, 184_622)),
    Size("GLM-Image-9B", "GlmImageForConditionalGeneration", _glm_image([8, 12, 12])),
)


def shrink(size: Size) -> Size:
    """The same classes with next to nothing in them, for machines without a GPU."""
    small: dict[str, Any] = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        vocab_size=128,
        vision_vocab_size=128,
        bos_token_id=1,
        pad_token_id=0,
    )
    if size.kind.startswith("GlmImage"):
        small |= _glm_image([1, 1, 0])
    codes = None if size.codes is None else range(4, 100)
    return replace(size, config=size.config | small, codes=codes)


def sketch(size: Size, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model without weights, without the part that reads images: no step runs it."""
    import transformers

    kind = getattr(transformers, size.kind)
    options = dict(size.config)
    if size.kind.startswith("Chameleon"):  # its configuration cannot do without names of codes
        assert size.codes is not None
        letters = str.maketrans("0123456789", "ABCDEFGHIJ")
        names = {f"IMGIMG{str(n).translate(letters)}Z": code for n, code in enumerate(size.codes)}
        options["vocabulary_map"] = {"<image>": size.codes[-1] + 1, **names}
    if size.kind.startswith("GlmImage"):  # of the part that writes
        options = {"text_config": options}
    config = kind.config_class(**options, dtype=dtype)
    config.eos_token_id = None  # a step is measured, not an end
    config.get_text_config().eos_token_id = None
    with torch.device("meta"):
        model = kind(config).to(dtype)
    body: Any = model.model
    for name in ("vqmodel", "visual"):
        if hasattr(body, name):
            delattr(body, name)
    return model


def build(size: Size, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model in evaluation mode with random weights, made on the device.

    Cost: memory of the weights on the device, once.
    """
    model = sketch(size, dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and not name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.normal_(0.0, _SPREAD, generator=generator)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
    for module in model.modules():  # `to_empty` left rotary frequencies without content
        if hasattr(module, "inv_freq"):
            with torch.device(device):
                fresh = type(module)(module.config)
            for name, value in fresh.named_buffers():
                setattr(module, name, value.clone())
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def open_window(model: Any, size: Size) -> CausalLMWindow:
    """The model as samplers see it: its image tokens alone."""
    if size.kind.startswith("GlmImage"):
        return GlmImageWindow(model)
    if size.codes is None:
        return CausalLMWindow(model)
    return ImageTokenWindow(model, size.codes)


def weight_bytes(model: Any, n_ids: int) -> int:
    """Bytes of weights that a pass has to read: all but the table of embeddings, and `n_ids` rows
    of the head, which may share its weights with them.
    """
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    apart = {id(head), id(table)}
    body = sum(weight.nbytes for weight in model.parameters() if id(weight) not in apart)
    return body + n_ids * head.shape[1] * head.element_size()


def key_bytes(model: Any, rows: int, positions: int) -> int:
    """Bytes of keys and values of a number of rows and positions."""
    config = model.config.get_text_config()
    heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize = model.get_output_embeddings().weight.element_size()
    return int(2 * config.num_hidden_layers * heads * width * rows * positions * itemsize)
