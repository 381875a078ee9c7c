"""One `generate` call whose prompt is reduced: its visual tokens or, of a text, its words.

Between the encoder and the language model a reducer says which features of each image stay,
whatever the batch. The columns of the others go, in every input that has columns, DeepStack
features with them; what stays keeps its position. The model's own prefill then processes the
shorter prompt: a decoding policy is as exact as it says with respect to the model on the tokens
that stayed.

Of equal features, merged inside the encoder (`mmaccel.pipelines.hosts.vision_language.encoder`),
all but one leave first; a method inside the language model
(`mmaccel.pipelines.hosts.prompt_cuts.layers`) comes last, or alone, where it drops words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any

import torch

from mmaccel.pipelines.hosts.generate_call import PER_LAYER, GenerateCall
from mmaccel.pipelines.hosts.prompt_cuts.columns import LeavingColumns
from mmaccel.pipelines.hosts.prompt_cuts.layers import DecoderLayers, FirstRun, PromptCuts
from mmaccel.pipelines.hosts.prompt_cuts.revival import RevivingCuts
from mmaccel.pipelines.hosts.vision_language.columns import (
    find_visual_columns,
    keep_columns,
    put_merged,
)
from mmaccel.pipelines.hosts.vision_language.encoder import EncoderCall
from mmaccel.pipelines.hosts.vision_language.exit_context import open_context
from mmaccel.pipelines.hosts.vision_language.kept import KeptTokens, find_kept_tokens
from mmaccel.pipelines.hosts.vision_language.places import find_missing
from mmaccel.pipelines.hosts.vision_language.reduction import OF_TOWER, VisualReduction
from mmaccel.pipelines.hosts.vision_language.visuals import Visual, find_seeds, find_visuals
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.plan import keep_tokens
from mmaccel.results import Stats


class VisualCall:
    """What reducers do in one call, and what they did."""

    def __init__(self, reduction: VisualReduction) -> None:
        self.reduction = reduction
        self.encoder: EncoderCall | None = None  # of a running call: nothing of its inputs is held
        self._begin()

    def _begin(self) -> None:
        """Forget what an earlier loop of the call did."""
        self._methods = self.reduction.methods
        self.encoded = (0, 0)  # patches of all images, and those that the encoder computed last
        self.counts: list[tuple[int, int]] = []  # of each image, tokens before and after its exit
        self.inside: FirstRun | PromptCuts | None = None  # the language model
        self._visuals: list[Visual] = []
        self._stays = torch.zeros(0, dtype=torch.bool)  # [B, T], columns that leave the encoder

    @contextmanager
    def running(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        seed: int | Sequence[int] | None,
        encodes_whole: bool = False,
    ) -> Iterator[None]:
        """Around transformers' `generate`: records or reduces the encoder where a method asks.

        Args:
            inputs: named arguments of the call, the prompt's ids among them.
            seed: of the policy; None is 0 for the encoder.
            encodes_whole: whether a loop that is not transformers' gets the features.
        """
        at_exit = self.reduction.find("encoder_exit")
        records = at_exit is not None and bool(at_exit.needs & OF_TOWER)
        ids = inputs.get("input_ids")
        first = 0 if seed is None else seed
        rows = range(1 if ids is None else len(ids))
        seeds = [first + r for r in rows] if isinstance(first, int) else list(first)
        method = None if encodes_whole else self.reduction.in_encoder
        with EncoderCall(model, dict(inputs), method, seeds, records) as encoder:
            self.encoder = encoder
            try:
                yield
            finally:
                self.encoder = None

    def encode_whole(self, model: Any, others: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a loop that no policy serves, with all tokens of reduced images."""
        encoder = self.encoder
        if encoder is None or not encoder.changed:
            return others
        encoded = {}
        for name in others["mm_encoder_outputs"]:
            encode = getattr(model.base_model, f"get_{name}_features")
            parameters = signature(encode).parameters
            options = {key: value for key, value in encoder.inputs.items() if key in parameters}
            encoded[name] = encode(**options, return_dict=True)
        ids = others["input_ids"]
        copies = encoder.copies(ids)
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
        if call.others.get("inputs_embeds") is not None:
            yield f"{slot} with a prompt of embeddings"
        if slot == "prompt_tokens":
            if call.others.get("mm_encoder_outputs"):
                yield f"{slot} with images, of which visual_tokens drops some"
        else:
            yield from self._find_in_features(call)

    def _find_in_features(self, call: GenerateCall) -> Iterator[str]:
        """What features that the caller has encoded lack for methods up to the encoder's exit."""
        encoder = self.encoder
        if encoder is None:
            return
        if (
            encoder.inputs.get("custom_generate") is not None
            and self.reduction.in_encoder is not None
        ):
            yield "visual_tokens in the encoder with custom_generate"
        if not encoder.inputs.get("mm_encoder_outputs"):
            return
        if self.reduction.in_encoder is not None:
            yield "visual_tokens in the encoder with mm_encoder_outputs given by the caller"
        for method in self.reduction.methods:
            if method.needs & OF_TOWER and method.stage == "encoder_exit":
                reads = f"{method.name}, which reads the encoder as it runs"
                yield f"mm_encoder_outputs given by the caller with {reads}"
            for modality in call.others["mm_encoder_outputs"]:
                missing = find_missing(call.model, modality, encoder.inputs)
                if missing is not None and method.stage == "encoder_exit":
                    yield f"mm_encoder_outputs given by the caller without {missing}"

    def apply(self, call: GenerateCall, seeds: Sequence[int]) -> GenerateCall:
        """The call on the tokens that stay; the call itself where none is to go."""
        self._begin()
        slot = self._find_slot(call)
        if slot == "prompt_tokens" and self.reduction.words is not None:
            method: TokenReducer | None = self.reduction.words
            self._methods = (self.reduction.words,)
            leaving = LeavingColumns.of_words(call, self.reduction.words)
        elif slot:
            if self.encoder is not None:
                call = self._leave_encoder(call, self.encoder, seeds)
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
        self, call: GenerateCall, encoder: EncoderCall, seeds: Sequence[int]
    ) -> GenerateCall:
        """The call on the tokens that an encoder, or the method at its exit, leaves."""
        method = self.reduction.find("encoder_exit")
        visuals = find_visuals(call, encoder.inputs, encoder.copies(call.ids))
        self.encoded = encoder.counts
        stays = self._stays = call.mask.to(call.ids.device).clone()
        self._visuals = [replace(v, features=v.features.new_zeros(0)) for v in visuals]
        encoded = dict(call.others.get("mm_encoder_outputs") or {})
        for modality in encoded:
            alike = [visual for visual in visuals if visual.modality == modality]
            left = encoder.find_left(alike)
            if left is None and method is None:
                continue
            seeded = find_seeds([visual.row for visual in alike], seeds)
            context = open_context(call, encoder, alike, seeded, left)
            plan = keep_tokens(context.valid, context.valid)
            if method is not None:
                plan = method.plan(context)
            if plan.merges:
                encoded[modality] = put_merged(encoded[modality], plan)
            for k, visual in enumerate(alike):
                kept = plan.keep[k][plan.valid[k]].to(stays.device)  # indices of its features
                total = len(visual.columns)
                if len(kept) == int((visual.places.source >= 0).sum()):
                    self.counts.append((total, total))  # nothing goes, nor do ends of its rows
                    continue
                self.counts.append((total, len(kept)))
                stays[visual.row, visual.columns] = False
                stays[visual.row, visual.columns[kept]] = True
        if all(before == after for before, after in self.counts):
            return call
        others = {**call.others, "mm_encoder_outputs": encoded}
        return keep_columns(replace(call, others=others), stays)

    def kept_tokens(self) -> list[KeptTokens]:
        """What the call kept of each image and video; empty where it had none, without a method,
        and where transformers' own loop ran.
        """
        inside = None if self.inside is None else self.inside.kept()
        return find_kept_tokens(self._visuals, self._stays, inside)

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
        if self.inside is not None:
            self.inside.record(stats)
