"""The reducers of an attached model: which there are, and whether the model can use them.

What they do in a call is `mmaccel.pipelines.vision_language.visual_call`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.causal_lm.compatibility import forward_parameters
from mmaccel.pipelines.causal_lm.family import CausalLM
from mmaccel.pipelines.vision_language.encoder import check_encoder
from mmaccel.pipelines.vision_language.layers import find_offered
from mmaccel.pipelines.vision_language.patches import OFFERED as PATCHES_OFFERED
from mmaccel.pipelines.vision_language.patches import check_patches
from mmaccel.pipelines.vision_language.pixels import OFFERED, check_pixels
from mmaccel.pipelines.vision_language.recall import OFFERED as RECALL_OFFERED
from mmaccel.pipelines.vision_language.tokens import offered
from mmaccel.reduction.visual_tokens.contract import Stage, TokenReducer
from mmaccel.reduction.visual_tokens.downsample_pixels import DownsamplePixels

OF_TOWER = {"keys", "cls_attention", "all_attention"}  # what the encoder says while it runs


@dataclass(frozen=True)
class VisualReduction:
    """The reducers of an attached model.

    Attributes:
        methods: of `visual_tokens=`, in the order of their stages.
    """

    methods: tuple[TokenReducer, ...] = ()

    def find(self, stage: Stage) -> TokenReducer | None:
        """The method of a stage, unless it keeps all."""
        return next((m for m in self.methods if m.keep != 1 and m.stage == stage), None)

    @property
    def in_encoder(self) -> TokenReducer | None:
        """The method that changes what the encoder computes."""
        return self.find("pixels") or self.find("encoder_layer")

    def check(self, model: Any, family: CausalLM) -> None:
        """Refuse methods that a model of a family cannot use.

        Raises:
            UnsupportedModelError: a model without what a method needs.
            OptionError: a method in front of a layer that the model lacks.
        """
        if "mm_encoder_outputs" not in family.arguments:
            raise UnsupportedModelError(
                f"visual_tokens: expected a vision-language model whose image prompts are served, "
                f"received a {type(model).__name__}; docs/visual-tokens.md lists them"
            )
        if "mm_encoder_outputs" not in forward_parameters(model):
            raise UnsupportedModelError(
                "visual_tokens: expected images that transformers encodes before its loop, "
                f"received a {type(model).__name__} that encodes them in its first pass; install "
                "transformers 5.23 or newer"
            )
        name = f"a {type(model).__name__}"
        first = self.in_encoder
        if first is not None and self.find("pixels") and self.find("encoder_layer"):
            raise UnsupportedModelError(
                "visual_tokens: expected one method before or in the encoder, received "
                f"{list(map(repr, self.methods))}; choose one of them"
            )
        for method in self.methods:
            if isinstance(method, DownsamplePixels):
                method.check(OFFERED, name)
                check_pixels(model)
            elif method.stage == "pixels":
                method.check(PATCHES_OFFERED, name)
                check_patches(model, method)
            elif method.stage == "encoder_layer":
                check_encoder(model, method)
            elif method.restarts:
                method.check(RECALL_OFFERED, name)
            elif method.stage == "llm_layer":
                revives = {"revival"} if method.revives else set[str]()
                method.check(find_offered(model) | revives, name)
            elif first is None:
                method.check(offered(model), name)
            else:  # whose layers have no keys and attention of all tokens
                method.check(offered(model) - OF_TOWER, f"{name} whose encoder {first!r} reduces")
            if method.stage == "llm_layer":
                method.layers_of(len(model.get_decoder().layers))
