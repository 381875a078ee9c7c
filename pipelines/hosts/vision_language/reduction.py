"""The reducers of an attached model, and which of them it can take as a part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmaccel.capabilities import GLOSSARY, Capable
from mmaccel.pipelines.hosts.causal_lm.compatibility import find_facts, forward_parameters
from mmaccel.pipelines.hosts.causal_lm.family import CausalLM
from mmaccel.pipelines.hosts.vision_language.encoder import find_depth
from mmaccel.pipelines.hosts.vision_language.towers import describe_features, describe_tower
from mmaccel.reduction.visual_tokens.contract import (
    Leaving,
    LeavingWords,
    PromptReducer,
    Stage,
    TokenReducer,
)

OF_TOWER = {"keys", "cls_attention", "all_attention"}  # what the encoder says while it runs
LOOKS = OF_TOWER | {
    "pixels", "last_attention", "text_attention", "text", "grid", "tiles", "frames",
}  # fmt: skip
_WHERE = {
    "pixels": "before its encoder",
    "encoder_layer": "in its encoder",
    "encoder_exit": "at the exit of its encoder",
    "llm_layer": "in its language model",
}


@dataclass(frozen=True)
class VisualReduction:
    """The reducers of an attached model."""

    methods: tuple[TokenReducer, ...] = ()  # of `visual_tokens=`, in the order of their stages
    words: PromptReducer | None = None  # of `prompt_tokens=`

    @property
    def parts(self) -> tuple[Any, ...]:
        """For `mmaccel.capabilities.explain`."""
        return (*self.methods, None if self.words is None else LeavingWords(self.words))

    def __bool__(self) -> bool:
        return bool(self.methods) or self.words is not None

    def find(self, stage: Stage) -> TokenReducer | None:
        """The method of a stage, unless it keeps all."""
        return next((m for m in self.methods if m.keep != 1 and m.stage == stage), None)

    @property
    def in_encoder(self) -> TokenReducer | None:
        """The method that changes what the encoder computes."""
        return self.find("pixels") or self.find("encoder_layer")


class VisionModel(Capable):
    """A model as a part: where visual tokens may leave it, and what reducers may look at there."""

    slot = "model"
    offers = frozenset(GLOSSARY)

    def __init__(self, model: Any, family: CausalLM, reduction: VisualReduction) -> None:
        self.model = model
        self._family = family
        self._in_encoder = reduction.in_encoder

    def lack(self, word: str, part: Any = None) -> str:
        if isinstance(part, LeavingWords):
            return self._lack_of_words(part.method) if word == "prompt words" else ""
        if isinstance(part, Leaving):
            return self._lack_of_stage(part.method)
        if word not in LOOKS or word in self._looks(part.stage):
            return ""
        if part.stage == "encoder_exit" and word in OF_TOWER and self._in_encoder is not None:
            return f"its encoder computes less by {self._in_encoder!r}"
        why = f"it has no {word} {_WHERE[part.stage]}"
        reads_all = word == "cls_attention" and "all_attention" in self._looks(part.stage)
        return f"{why}; queries='all' works with it" if reads_all else why

    def _looks(self, stage: Stage) -> frozenset[str]:
        """What methods of a stage may look at."""
        if stage == "pixels":
            return frozenset({"pixels", "grid"})
        if stage == "llm_layer":
            return frozenset({"keys", "last_attention", "text_attention", "text"})
        tower = describe_tower(self.model)
        of_class = {"cls_attention"} if tower is not None and tower.has_class_token else set()
        if stage == "encoder_layer":
            return frozenset({"keys", "grid"} | of_class)
        looks = describe_features(self.model).looks | {"text"}
        if self._in_encoder is not None:  # whose layers have no keys and attention of all tokens
            return looks - OF_TOWER
        return looks | of_class if "keys" in looks else looks

    def _lack_of_words(self, method: TokenReducer) -> str:
        """Why no word of a prompt can leave the model where a method works."""
        if not self._family.takes_own_prompt:
            return "its prompts are more than words"
        if getattr(self.model.get_decoder(), "layers", None) is None:
            return "its decoder has no list of its layers"
        return self._lack_of_layers(method)

    def _lack_of_stage(self, method: TokenReducer) -> str:
        """Why no visual token can leave the model where a method works."""
        model = self.model
        if "mm_encoder_outputs" not in self._family.arguments:
            remedy = "" if not isinstance(method, PromptReducer) else "; prompt_tokens= takes words"
            return f"it is none whose image prompts are served, see docs/visual-tokens.md{remedy}"
        if "mm_encoder_outputs" not in forward_parameters(model):
            return "it encodes images in its first pass; install transformers 5.23 or newer"
        tower = describe_tower(model)
        features = describe_features(model)
        if method.stage == "pixels":
            return "" if tower is not None else f"its encoder {features.unmerged}"
        if method.stage == "encoder_layer":
            if features.unmerged:
                remedy = "use a method after it, such as DivPrune or FastV"
                return f"its encoder {features.unmerged}; {remedy}"
            method.layers_of(find_depth(model, {}))
            if getattr(method, "features", "auto") == "merged" and not features.are_tokens:
                return 'its projector pools or shuffles the grid; give features="all"'
        elif method.stage == "llm_layer":
            vision = getattr(model.config, "vision_config", None)
            deep = len(getattr(vision, "deepstack_visual_indexes", ()))
            if not method.restarts and method.layers_of(self._depth)[0] < deep:
                return (
                    f"visual features enter its first {deep} layers; choose layers from {deep} on"
                )
            return self._lack_of_layers(method, "; use ILRe or a method at the exit")
        return ""

    @property
    def _depth(self) -> int:
        return len(self.model.get_decoder().layers)

    def _lack_of_layers(self, method: TokenReducer, remedy: str = "") -> str:
        """Why no token can leave in front of a method's layers of the language model."""
        method.layers_of(self._depth)
        if method.restarts:
            return ""
        if any(window is not None for window in find_facts(self.model).windows):
            return f"it has layers that slide, which count columns{remedy}"
        return ""
