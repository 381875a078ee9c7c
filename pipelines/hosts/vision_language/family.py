"""The family of vision-language models: image and video prompts in front of windows of text.

The first pass, with the features of the images that transformers has encoded, runs as it is, as the
prompt's own prefill (`mmaccel.pipelines.hosts.causal_lm.own_prompt`): embeddings, DeepStack
features, masks that see an image in both directions, and positions (mRoPE, timestamps) are the
model's own. Text after an image goes on one position after the largest of the prompt, the same in
all coordinates.

Source: the `forward`, `prepare_inputs_for_generation` and `get_rope_index` of these models in
transformers 5.17 to 5.24.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mmaccel.pipelines.hosts.causal_lm.family import CausalLM
from mmaccel.pipelines.hosts.generate_call import OF_PROMPT, SAMPLE, Table
from mmaccel.pipelines.hosts.vision_language.visuals import find_placeholders

IMAGES = (
    "image_grid_thw",
    "image_sizes",
    "image_sizes_videos",
    "batch_num_images",
    "mm_encoder_outputs",
    "pixel_attention_mask",
    "pixel_values",
    "pixel_values_videos",
    "second_per_grid_ts",
    "video_grid_thw",
    "vision_aspect_ratio",
    "vision_feature_layer",
    "vision_feature_select_strategy",
)
"""Arguments for a model's forward that say what an image or a video of the prompt is."""


class VisionLanguage(CausalLM):
    """LLaVA, LLaVA-NeXT, LLaVA-OneVision, Qwen2-VL, 2.5, 3, InternVL, Idefics3, SmolVLM, Gemma 3,
    Chameleon: see `mmaccel.catalog.FAMILIES`.
    """

    name: ClassVar[str] = "vision_language"
    arguments: ClassVar[Table] = SAMPLE | dict.fromkeys(IMAGES, OF_PROMPT)

    def placeholders(self, model: Any) -> frozenset[int]:
        return find_placeholders(model)
