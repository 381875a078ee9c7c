"""One `generate` call whose prompt is reduced: its visual tokens or, of a text, its words.

Between the encoder and the language model a reducer looks at the features of each image and says
which of them stay. Their placeholders stay in the prompt, the other columns go, in every input that
has columns; a kept token has the position that it had, and so has the text behind it. DeepStack
features go with their token. The model's own prefill then processes the shorter prompt, and a
window takes over its keys and values: a decoding policy is as exact as it says with respect to the
model on the tokens that stayed.

Each image is reduced for itself, so that a row's tokens do not depend on its batch.

A method that merges inside the encoder (`mmaccel.pipelines.vision_language.encoder`) leaves equal
features; here all but one of them leave the prompt, before a method at the exit looks at the rest.
A method inside the language model comes last (`mmaccel.pipelines.prompt_cuts.layers`), or
alone, where it drops words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

from mmaccel.pipelines.generate_call import PER_LAYER, GenerateCall
from mmaccel.pipelines.prompt_cuts.columns import LeavingColumns
from mmaccel.pipelines.prompt_cuts.layers import DecoderLayers, PromptCuts
from mmaccel.pipelines.prompt_cuts.recall import FirstRun
from mmaccel.pipelines.prompt_cuts.revival import RevivingCuts
from mmaccel.pipelines.vision_language.columns import (
    find_kept,
    find_visual_columns,
    keep_columns,
    reduce_visuals,
)
from mmaccel.pipelines.vision_language.encoder import EncoderReduction
from mmaccel.pipelines.vision_language.kept import KeptTokens, KeptVisuals
from mmaccel.pipelines.vision_language.patches import PrunedPack, PrunedRows
from mmaccel.pipelines.vision_language.pixels import PixelReduction
from mmaccel.pipelines.vision_language.reduction import OF_TOWER, VisualReduction
from mmaccel.pipelines.vision_language.tokens import (
    EncoderRecord,
    find_missing,
    find_places,
    open_context,
    read_text,
    recorded_encoder,
)
from mmaccel.pipelines.vision_language.tower_reduction import TowerReduction
from mmaccel.pipelines.vision_language.towers import describe_tower
from mmaccel.pipelines.vision_language.visuals import find_seeds, find_visuals
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.downsample_pixels import DownsamplePixels
from mmaccel.reduction.visual_tokens.plan import keep_tokens
from mmaccel.results import Stats


@dataclass(frozen=True)
class GivenInputs:
    """What `generate` was called with, and what its encoder does.

    Attributes:
        inputs: its named arguments, the prompt's ids among them.
        encoder: the reduction inside the encoder, or None.
        record: of the encoder, where a method asks for it.
        has_features: whether the caller has encoded images.
    """

    inputs: Mapping[str, Any]
    encoder: TowerReduction | None
    record: EncoderRecord | None
    has_features: bool

    @property
    def n_rows(self) -> int:
        """Rows of its prompt."""
        ids = self.inputs.get("input_ids")
        return 0 if ids is None else len(ids)


def _find_reduction(model: Any, method: TokenReducer) -> type[TowerReduction]:
    """What carries out a method in or before the encoder."""
    if isinstance(method, DownsamplePixels):
        return PixelReduction
    if method.stage == "encoder_layer":
        return EncoderReduction
    tower = describe_tower(model)
    assert tower is not None  # see VisionModel
    return PrunedPack if tower.patches == "packed" else PrunedRows


class VisualCall:
    """What reducers do in one call, and what they did.

    Args:
        reduction: the reducers.

    Attributes:
        given: None before the call and after it, so that nothing of its inputs is held.
        encoded: (tokens before, tokens after) of the encoder, over all images.
        counts: (tokens before, tokens after) the encoder's exit, of each image.
        inside: the reduction inside the language model; None without.
    """

    def __init__(self, reduction: VisualReduction) -> None:
        self.reduction = reduction
        self.given: GivenInputs | None = None
        self._begin()

    def _begin(self) -> None:
        """Nothing was reduced: a call may run several loops."""
        self._methods = self.reduction.methods
        self.encoded = (0, 0)
        self.counts: list[tuple[int, int]] = []
        self.inside: FirstRun | PromptCuts | None = None
        self._kept: KeptVisuals | None = None

    @contextmanager
    def running(
        self, model: Any, inputs: Mapping[str, Any], seed: int | Sequence[int] | None
    ) -> Iterator[None]:
        """Around transformers' `generate`: records or reduces the encoder where a method asks.

        Args:
            inputs: named arguments of the call, the prompt's ids among them.
            seed: of the policy; None is 0 for the encoder.
        """
        at_exit = self.reduction.find("encoder_exit")
        method = self.reduction.in_encoder
        encoder: TowerReduction | None = None
        if method is not None:
            ids = inputs.get("input_ids")
            first = 0 if seed is None else seed
            rows = range(1 if ids is None else len(ids))
            seeds = [first + r for r in rows] if isinstance(first, int) else list(first)
            encoder = _find_reduction(model, method)(model, method, inputs, seeds)
        wanted = at_exit is not None and bool(at_exit.needs & OF_TOWER)
        with (
            recorded_encoder(model, wanted) as record,
            nullcontext() if encoder is None else encoder.applied(),
        ):
            has_features = bool(inputs.get("mm_encoder_outputs"))
            self.given = GivenInputs(dict(inputs), encoder, record, has_features)
            try:
                yield
            finally:
                self.given = None

    def encode_whole(self, model: Any, others: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a decoding loop by name, with all tokens of images that were encoded
        with fewer: for calls that a policy does not serve.
        """
        given = self.given
        if given is None or given.encoder is None or not given.encoder.changed:
            return others
        encoded = {}
        with given.encoder.paused():
            for name in others["mm_encoder_outputs"]:
                encode = getattr(model.base_model, f"get_{name}_features")
                own = signature(encode).parameters
                options = {key: value for key, value in given.inputs.items() if key in own}
                encoded[name] = encode(**options, return_dict=True)
        ids = others["input_ids"]
        copies = len(ids) // given.n_rows if given.n_rows else 1
        if copies > 1:
            encoded = model._expand_multimodal_outputs(ids[::copies], encoded, expand_size=copies)
        return {**others, "mm_encoder_outputs": encoded}

    def _find_slot(self, call: GenerateCall) -> str:
        """The keyword whose methods work on a call; empty where none do."""
        words = self.reduction.words
        has_words = words is not None and words.keep != 1
        if call.others.get("mm_encoder_outputs") and (self.reduction.methods or not has_words):
            return "visual_tokens" if self.reduction.methods else ""
        return "prompt_tokens" if has_words else ""

    def obstacles(self, call: GenerateCall) -> Iterator[str]:
        """Reasons why a call cannot be decoded on fewer tokens."""
        slot = self._find_slot(call)
        if not slot:
            return
        if call.n_cached:
            yield f"{slot} with a cache given by the caller"
        if call.returns_cache:
            yield f"{slot} with a cache that the caller sees"
        if call.guidance is not None:
            yield f"{slot} with guidance"
        if call.records & set(PER_LAYER.values()):
            yield f"{slot} with hidden states or attentions of all tokens"
        if slot == "prompt_tokens":
            in_layers = True
            if call.others.get("inputs_embeds") is not None:
                yield f"{slot} with a prompt of embeddings"
            if call.others.get("mm_encoder_outputs"):
                yield f"{slot} with images, of which visual_tokens drops some"
        else:
            in_layers = any(method.stage == "llm_layer" for method in self.reduction.methods)
            yield from self._find_in_features(call)
        if in_layers and call.config.prefill_chunk_size is not None:
            yield f"{slot} inside the language model with a prefill in chunks"

    def _find_in_features(self, call: GenerateCall) -> Iterator[str]:
        """What features that the caller has encoded lack for methods up to the encoder's exit."""
        given = self.given
        if given is None:
            return
        if given.encoder is not None and not given.encoder.ran:
            yield "visual_tokens in the encoder with mm_encoder_outputs given by the caller"
        if not given.has_features:
            return
        for method in self.reduction.methods:
            if method.needs & OF_TOWER and method.stage == "encoder_exit":
                reads = f"{method.name}, which reads the encoder as it runs"
                yield f"mm_encoder_outputs given by the caller with {reads}"
            for modality in call.others["mm_encoder_outputs"]:
                missing = find_missing(call.model, modality, given.inputs)
                if missing is not None and method.stage == "encoder_exit":
                    yield f"mm_encoder_outputs given by the caller without {missing}"

    def apply(self, call: GenerateCall, seeds: Sequence[int]) -> GenerateCall:
        """The call on the tokens that stay; the call itself where none is to go.

        Args:
            call: one that can be served.
            seeds: of its rows, for methods that draw.
        """
        self._begin()
        slot = self._find_slot(call)
        if slot == "prompt_tokens" and self.reduction.words is not None:
            method: TokenReducer | None = self.reduction.words
            self._methods = (self.reduction.words,)
            leaving = LeavingColumns.of_words(call, self.reduction.words)
        elif slot:
            if self.given is not None:
                call = self._leave_encoder(call, self.given, seeds)
            method = self.reduction.find("llm_layer")
            leaving = find_visual_columns(call)
        if not slot or method is None:
            return call
        layers = DecoderLayers(call, method, seeds, leaving)
        if slot == "prompt_tokens" and not layers.drops_some:
            return call
        if not method.restarts:
            self.inside = RevivingCuts(layers) if method.revives else PromptCuts(layers)
        elif layers.drops_some:
            self.inside = FirstRun(layers)
            self.inside.run(call)
            call = keep_columns(call, self.inside.stays)
        return call

    @property
    def cuts(self) -> PromptCuts | None:
        """What drops tokens while the prompt is processed; None where nothing does."""
        return self.inside if isinstance(self.inside, PromptCuts) else None

    def _leave_encoder(
        self, call: GenerateCall, given: GivenInputs, seeds: Sequence[int]
    ) -> GenerateCall:
        """The call on the tokens that an encoder, or the method at its exit, leaves."""
        method = self.reduction.find("encoder_exit")
        first = given.encoder
        visuals = find_visuals(call, len(call.ids) // given.n_rows if given.n_rows else 1)
        self._kept = KeptVisuals(call.model, visuals, given.inputs)
        if first is not None and first.changed:
            self.encoded = first.counts
        elif method is None:
            return call
        for modality in dict.fromkeys(visual.modality for visual in visuals):
            own = [visual for visual in visuals if visual.modality == modality]
            left = None
            if first is not None:
                left = first.find_left(own, find_places(call.model, own, given.inputs))
            if left is None and method is None:
                continue
            seeded = find_seeds([visual.row for visual in own], seeds)
            context = open_context(
                call.model,
                own,
                given.inputs,
                seeded,
                given.record,
                left,
                text=partial(read_text, call, own),
            )
            if method is None:
                plan = keep_tokens(context.valid, context.valid)
            else:
                plan = method.plan(context)
            is_whole = (plan.counts == context.counts).tolist()
            if left is not None:
                pairs = zip(is_whole, left, strict=True)
                is_whole = [whole and bool(kept.all()) for whole, (kept, _) in pairs]
            for visual, n, whole in zip(own, plan.counts.tolist(), is_whole, strict=True):
                total = len(visual.features)
                self.counts.append((total, total if whole else n))
            if not all(is_whole):
                self._kept = self._kept.leave(own, find_kept(own, plan, is_whole))
                call = reduce_visuals(call, own, plan, is_whole)
        return call

    def kept_tokens(self) -> list[KeptTokens]:
        """What the call kept of each image and video; empty where it had none, where no method was
        given, or where transformers' own loop ran.
        """
        if self._kept is None:
            return []
        if self.inside is None:
            return self._kept.find()
        return self._kept.leave_of_rows(self.inside.kept()).find()

    def describe(self) -> str:
        """What the call kept, for its statistics; empty where nothing was to go."""
        parts = []
        before, after = self.encoded
        if after < before:
            parts.append(f"{after} of {before} tokens of its encoder")
        before, after = (sum(pair[k] for pair in self.counts) for k in range(2))
        if after < before:
            parts.append(f"{after} of {before} visual tokens")
        inside = "" if self.inside is None else self.inside.describe()
        if inside:
            parts.append(inside)
        names = ", ".join(map(repr, self._methods))
        return f"the model on {', '.join(parts)} ({names})" if parts else ""

    def record(self, stats: Stats) -> None:
        """Add what the call's own runs cost to its statistics."""
        if self.inside is not None:
            self.inside.record(stats)
