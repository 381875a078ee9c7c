"""Visual tokens of a prompt that are dropped or merged before the first layer.

Between the encoder and the language model a reducer looks at the features of each image and says
which of them stay. Their placeholders stay in the prompt, the other columns go, in every input that
has columns; a kept token has the position that it had, and so has the text behind it. DeepStack
features go with their token. The model's own prefill then processes the shorter prompt, and a
window takes over its keys and values: a decoding policy is as exact as it says with respect to the
model on the tokens that stayed.

Each image is reduced for itself, so that a row's tokens do not depend on its batch.

A method that merges inside the encoder (`mmaccel.pipelines.vision_language.encoder`) leaves equal
features; here all but one of them leave the prompt, before a method at the exit looks at the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmaccel.checks import show
from mmaccel.contracts import Policy
from mmaccel.errors import OptionError, UnsupportedModelError
from mmaccel.pipelines.causal_lm.compatibility import forward_parameters
from mmaccel.pipelines.causal_lm.family import CausalLM
from mmaccel.pipelines.generate_call import PER_LAYER, GenerateCall
from mmaccel.pipelines.vision_language.encoder import EncoderReduction, check_encoder
from mmaccel.pipelines.vision_language.layers import LayerReduction, find_offered
from mmaccel.pipelines.vision_language.pixels import OFFERED, PixelReduction, check_pixels
from mmaccel.pipelines.vision_language.recall import OFFERED as RECALL_OFFERED
from mmaccel.pipelines.vision_language.recall import Recall, recall
from mmaccel.pipelines.vision_language.revival import LayerRevival
from mmaccel.pipelines.vision_language.tokens import (
    EncoderRecord,
    Places,
    find_missing,
    find_places,
    offered,
    open_context,
    recorded_encoder,
)
from mmaccel.pipelines.vision_language.visuals import (
    Visual,
    find_placeholder,
    find_seeds,
    find_visuals,
    flatten_features,
    join_features,
    split_features,
)
from mmaccel.reduction.visual_tokens.contract import Stage, TokenReducer
from mmaccel.reduction.visual_tokens.downsample_pixels import DownsamplePixels
from mmaccel.reduction.visual_tokens.plan import Plan, keep_tokens, reduce
from mmaccel.results import Stats
from mmaccel.samplers.window.autoregressive import Autoregressive

_OF_TOWER = {"keys", "cls_attention", "all_attention"}
_COLUMNS = ("token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class _Given:
    """What `generate` was called with, and what its encoder did."""

    inputs: Mapping[str, Any]
    record: EncoderRecord | None
    has_features: bool  # of images that the caller has encoded
    encoder: EncoderReduction | PixelReduction | None

    @property
    def n_rows(self) -> int:
        """Rows of its prompt."""
        ids = self.inputs.get("input_ids")
        return 0 if ids is None else len(ids)


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Which visual tokens of one image or video a call kept.

    Attributes:
        modality: "image" or "video".
        index: among those of its modality that `generate` was called with.
        row: of the batch.
        kept: `[n]` bool, on the CPU; a merged token counts where it stands for its slot.
        places: where the tokens stand in the image.
    """

    modality: str
    index: int
    row: int
    kept: Tensor
    places: Places

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens before, and after."""
        return len(self.kept), int(self.kept.sum())


@dataclass(frozen=True)
class _Seen:
    """A call's images and videos, without their features and pixels."""

    model: Any
    visuals: list[Visual]
    inputs: dict[str, Any]
    stays: dict[tuple[str, int, int], Tensor]  # indices that left the encoder


_GIVEN: ContextVar[_Given | None] = ContextVar("mmaccel_visual_inputs", default=None)


@dataclass
class VisualReduction:
    """The reducers of an attached model.

    Args:
        methods: of `visual_tokens=`, in the order of their stages.

    Attributes:
        counts: (tokens before, tokens after) of each image of the last call.
        recall: what the last call's first run chose; None without.
        layers: the last call's reduction inside the language model; None without.
        encoded: (tokens before, tokens after) of the last call's encoder, over all images.
    """

    methods: tuple[TokenReducer, ...] = ()
    counts: list[tuple[int, int]] = field(default_factory=list)
    recall: Recall | None = None
    layers: LayerReduction | None = None
    encoded: tuple[int, int] = (0, 0)
    _seen: _Seen | None = None

    def check(self, model: Any, family: CausalLM, policy: Policy) -> None:
        """Refuse methods that a model of a family, or a policy, cannot use.

        Raises:
            UnsupportedModelError: a model without what a method needs.
            OptionError: a method in front of a layer that the model lacks; windows of drafts under
                a method that revives.
        """
        if not family.prompt_inputs:
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
        name, first = f"a {type(model).__name__}", self._in_encoder()
        if first is not None and self._method("pixels") and self._method("encoder_layer"):
            raise UnsupportedModelError(
                "visual_tokens: expected one method before or in the encoder, received "
                f"{list(map(repr, self.methods))}; choose one of them"
            )
        for method in self.methods:
            if method.stage == "pixels":
                method.check(OFFERED, name)
                check_pixels(model)
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
                method.check(offered(model) - _OF_TOWER, f"{name} whose encoder {first!r} reduces")
            if method.stage == "llm_layer":
                method.layers_in(len(model.get_decoder().layers))
            if method.revives and not isinstance(policy, Autoregressive):
                raise OptionError(
                    f"visual_tokens: expected Autoregressive() with {method!r}, because every "
                    f"token decides what is revived, and drafts would; received {show(policy)}; "
                    f"{method.remedy}"
                )

    def _method(self, stage: Stage) -> TokenReducer | None:
        """The method of a stage, unless it keeps all."""
        return next((m for m in self.methods if m.keep != 1 and m.stage == stage), None)

    def _in_encoder(self) -> TokenReducer | None:
        """The method that changes what the encoder computes."""
        return self._method("pixels") or self._method("encoder_layer")

    @contextmanager
    def watching(
        self, model: Any, inputs: Mapping[str, Any], seed: int | Sequence[int] | None
    ) -> Iterator[None]:
        """Around a `generate` call: keeps its inputs; records or reduces its encoder where asked.

        Args:
            model: the model.
            inputs: named arguments of the call, the prompt's ids among them.
            seed: of the policy; None is 0 for the encoder.
        """
        self._forget()
        if not self.methods:
            yield
            return
        at_exit, method = self._method("encoder_exit"), self._in_encoder()
        encoder: EncoderReduction | PixelReduction | None = None
        if isinstance(method, DownsamplePixels):
            encoder = PixelReduction(model, method, inputs)
        elif method is not None:
            ids = inputs.get("input_ids")
            first, rows = (0 if seed is None else seed), range(1 if ids is None else len(ids))
            seeds = [first + r for r in rows] if isinstance(first, int) else list(first)
            encoder = EncoderReduction(model, method, inputs, seeds)
        wanted = at_exit is not None and bool(at_exit.needs & _OF_TOWER)
        with (
            recorded_encoder(model, wanted) as record,
            nullcontext() if encoder is None else encoder.applied(),
        ):
            has_features = bool(inputs.get("mm_encoder_outputs"))
            token = _GIVEN.set(_Given(dict(inputs), record, has_features, encoder))
            try:
                yield
            finally:
                _GIVEN.reset(token)

    def encode_whole(self, model: Any, ids: Tensor, others: dict[str, Any]) -> dict[str, Any]:
        """The named arguments of a decoding loop, with all tokens of images that were encoded with
        fewer: for calls that a policy does not serve.

        Args:
            model: the model.
            ids: `[B, T]`, of the loop's prompt.
            others: its named arguments.
        """
        given = _GIVEN.get()
        if given is None or given.encoder is None or not given.encoder.changed:
            return others
        encoded = {}
        with given.encoder.paused():
            for name in others["mm_encoder_outputs"]:
                encode = getattr(model.base_model, f"get_{name}_features")
                own = signature(encode).parameters
                options = {key: value for key, value in given.inputs.items() if key in own}
                encoded[name] = encode(**options, return_dict=True)
        copies = len(ids) // given.n_rows if given.n_rows else 1
        if copies > 1:
            encoded = model._expand_multimodal_outputs(ids[::copies], encoded, expand_size=copies)
        return {**others, "mm_encoder_outputs": encoded}

    def obstacles(self, call: GenerateCall) -> Iterator[str]:
        """Reasons why a call cannot be decoded on fewer visual tokens."""
        if not self.methods or not call.others.get("mm_encoder_outputs"):
            return
        if call.n_cached:
            yield "visual_tokens with a cache given by the caller"
        if call.returns_cache:
            yield "visual_tokens with a cache that the caller sees"
        if call.guidance is not None:
            yield "visual_tokens with guidance"
        if call.records & set(PER_LAYER.values()):
            yield "visual_tokens with hidden states or attentions of all tokens"
        given = _GIVEN.get()
        if given is not None and given.encoder is not None and not given.encoder.ran:
            yield "visual_tokens in the encoder with mm_encoder_outputs given by the caller"
        yield from self._find_in_features(call)
        in_layers = any(method.stage == "llm_layer" for method in self.methods)
        if in_layers and call.config.prefill_chunk_size is not None:
            yield "visual_tokens inside the language model with a prefill in chunks"

    def _find_in_features(self, call: GenerateCall) -> Iterator[str]:
        """What features that the caller has encoded lack for methods at the encoder's exit."""
        given = _GIVEN.get()
        if given is None or not given.has_features:
            return
        for method in self.methods:
            if method.needs & _OF_TOWER and method.stage == "encoder_exit":
                reads = f"{method.name}, which reads the encoder as it runs"
                yield f"mm_encoder_outputs given by the caller with {reads}"
            for modality in call.others["mm_encoder_outputs"]:
                missing = find_missing(call.model, modality, given.inputs)
                if missing is not None and method.stage == "encoder_exit":
                    yield f"mm_encoder_outputs given by the caller without {missing}"

    def apply(self, call: GenerateCall, seeds: Sequence[int]) -> GenerateCall:
        """The call on the visual tokens that stay; the call itself where none is to go.

        Args:
            call: one that can be served.
            seeds: of its rows, for methods that draw.
        """
        self._forget()
        given = _GIVEN.get()
        if not self.methods or given is None or not call.others.get("mm_encoder_outputs"):
            return call
        visuals = find_visuals(call, len(call.ids) // given.n_rows if given.n_rows else 1)
        self._seen = _note(call.model, visuals, given.inputs)
        call, method = self._apply_at_exit(call, visuals, given, seeds), self._method("llm_layer")
        if method is not None and method.restarts:
            self.recall = recall(call, method, seeds)
            call = call if self.recall is None else keep_columns(call, self.recall.stays)
        return call

    def _forget(self) -> None:
        self.counts, self.encoded, self._seen = [], (0, 0), None
        self.recall = self.layers = None

    def _apply_at_exit(
        self,
        call: GenerateCall,
        visuals: Sequence[Visual],
        given: _Given,
        seeds: Sequence[int],
    ) -> GenerateCall:
        method = self._method("encoder_exit")
        assert self._seen is not None
        first = given.encoder
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
            context = open_context(call.model, own, given.inputs, seeded, given.record, left)
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
                kept = _indices(own, plan, is_whole)
                self._seen.stays.update({_name(v): k for v, k in zip(own, kept, strict=True)})
                call = _reduce(call, own, plan, is_whole, kept)
        return call

    def open_layers(self, call: GenerateCall, seeds: Sequence[int]) -> LayerReduction | None:
        """What drops tokens of a call inside the language model; None where nothing does."""
        method = self._method("llm_layer")
        if method is not None and not method.restarts and call.others.get("mm_encoder_outputs"):
            kind = LayerRevival if method.revives else LayerReduction
            self.layers = kind(call, method, seeds)
        return self.layers

    def kept_tokens(self) -> list[KeptTokens]:
        """What the last call kept of each image and video; empty where it had none, where no
        method was given, or where transformers' own loop ran.
        """
        seen = self._seen
        if seen is None:
            return []
        stays = {_name(v): torch.arange(len(v.columns)) for v in seen.visuals}
        stays |= seen.stays
        if self.recall is not None:
            stays = _after_layers(seen.visuals, stays, self.recall.kept())
        if self.layers is not None:
            stays = _after_layers(seen.visuals, stays, self.layers.kept())
        found = []
        for modality in dict.fromkeys(visual.modality for visual in seen.visuals):
            own = [visual for visual in seen.visuals if visual.modality == modality]
            for visual, places in zip(own, find_places(seen.model, own, seen.inputs), strict=True):
                kept = torch.zeros(len(visual.columns), dtype=torch.bool)
                kept[stays[_name(visual)]] = True
                found.append(KeptTokens(modality, visual.index, visual.row, kept, places))
        return found

    def describe(self) -> str:
        """What the last call kept, for its statistics; empty where nothing was to go."""
        parts = []
        before, after = self.encoded
        if after < before:
            parts.append(f"{after} of {before} tokens of its encoder")
        before, after = (sum(pair[k] for pair in self.counts) for k in range(2))
        if after < before:
            parts.append(f"{after} of {before} visual tokens")
        if self.recall is not None:
            count = f"{self.recall.after} of {self.recall.before} visual tokens"
            parts.append(f"{count} recalled in front of layer {self.recall.layer}")
        if self.layers is not None and self.layers.cuts:
            before, after = (int(counts.sum()) for counts in self.layers.counts)
            first = self.layers.cuts[0].first
            when = ", at every step" if isinstance(self.layers, LayerRevival) else ""
            parts.append(f"{after} of {before} visual tokens after layer {first}{when}")
        names = ", ".join(map(repr, self.methods))
        return f"the model on {', '.join(parts)} ({names})" if parts else ""

    def count_runs(self, stats: Stats) -> None:
        """Add what the last call's own runs cost to its statistics."""
        if self.recall is not None:
            stats.prefill_passes += 1
            stats.tokens_processed += self.recall.n_processed
            stats.seconds += self.recall.seconds
            stats.forward_seconds += self.recall.seconds
        if isinstance(self.layers, LayerRevival):
            count = int(self.layers.steps.n_revived)
            stats.notes.append(f"visual_tokens: {count} tokens were revived by later steps")


def _note(model: Any, visuals: Sequence[Visual], inputs: Mapping[str, Any]) -> _Seen:
    """What `KeptTokens` needs of a call: no features, and of pixels the shapes alone."""
    bare = [replace(v, features=v.features.new_empty(len(v.features), 0)) for v in visuals]
    shapes = {
        name: value.to("meta") if name.startswith("pixel_values") else value
        for name, value in inputs.items()
        if isinstance(value, Tensor)
    }
    return _Seen(model, bare, shapes, {})


def _name(visual: Visual) -> tuple[str, int, int]:
    """What tells an image or video, and its copies in other rows, from others."""
    return visual.modality, visual.row, visual.index


def _after_layers(
    visuals: Sequence[Visual], stays: Mapping[tuple[str, int, int], Tensor], kept: Sequence[Tensor]
) -> dict[tuple[str, int, int], Tensor]:
    """Indices that are left of `stays` where of each row's visual columns `kept` are."""
    found = dict[tuple[str, int, int], Tensor]()
    for row, own in enumerate(kept):
        names = [_name(v) for v in visuals if v.row == row]
        columns = [v.columns.cpu()[stays[_name(v)]] for v in visuals if v.row == row]
        if not names:
            continue
        rank = torch.cat(columns).argsort().argsort()  # images and videos may alternate
        parts = own[rank].split([len(part) for part in columns])
        found |= {name: stays[name][part] for name, part in zip(names, parts, strict=True)}
    return found


def _indices(visuals: Sequence[Visual], plan: Plan, is_whole: Sequence[bool]) -> list[Tensor]:
    """Of each image, the indices among its features that stay."""
    return [
        torch.arange(len(v.features)) if whole else plan.keep[k][plan.valid[k]].cpu()
        for k, (v, whole) in enumerate(zip(visuals, is_whole, strict=True))
    ]


def _reduce(
    call: GenerateCall, visuals: Sequence[Visual], plan: Plan, is_whole: Sequence[bool],
    kept: Sequence[Tensor],
) -> GenerateCall:  # fmt: skip
    """The call with a modality's tokens reduced to the indices `kept` of each image."""
    modality = visuals[0].modality
    encoded = dict(call.others["mm_encoder_outputs"])
    output = copy(encoded[modality])

    def shorten(features: Sequence[Tensor]) -> list[Tensor]:
        made = reduce(pad_sequence(list(features), batch_first=True), plan)
        return [
            f if whole else m[: len(k)]
            for f, m, k, whole in zip(features, made, kept, is_whole, strict=True)
        ]

    pooled = output.pooler_output
    output.pooler_output = join_features(shorten(split_features(pooled)), pooled)
    deep = getattr(output, "deepstack_features", None)
    if deep is not None:
        output.deepstack_features = [shorten(features) for features in deep]
    encoded[modality] = output

    placeholder = find_placeholder(call.model, modality)
    stays = (call.ids != placeholder) & call.mask.to(call.ids.device)
    for visual, own in zip(visuals, kept, strict=True):
        stays[visual.row, visual.columns[own.to(visual.columns.device)]] = True
    return _take_columns(call, stays, {"mm_encoder_outputs": encoded})


def keep_columns(call: GenerateCall, stays: Tensor) -> GenerateCall:
    """The call with the columns where `stays` `[B, T]` bool, and the features of those."""
    encoded = dict(call.others["mm_encoder_outputs"])
    for modality, output in encoded.items():
        kept = stays[call.ids == find_placeholder(call.model, modality)]
        made = copy(output)
        own = flatten_features(output.pooler_output)[kept]
        made.pooler_output = join_features([own], output.pooler_output)
        deep = getattr(output, "deepstack_features", None)
        if deep is not None:
            made.deepstack_features = [[flatten_features(layer)[kept]] for layer in deep]
        encoded[modality] = made
    return _take_columns(call, stays, {"mm_encoder_outputs": encoded})


def _take_columns(call: GenerateCall, stays: Tensor, others: dict[str, Any]) -> GenerateCall:
    """The call with the columns where `stays` `[B, T]`, padded on the left."""
    width = int(stays.sum(1).max())
    order = stays.long().argsort(dim=1, stable=True)[:, -width:]  # those that stay come last
    mask = stays.gather(1, order)

    def take(values: Tensor) -> Tensor:
        """`[..., B or 1, T]`."""
        index = order.expand(*values.shape[:-2], *order.shape)
        return values.to(order.device).expand(*values.shape[:-2], *stays.shape).gather(-1, index)

    positions = call.others.get("position_ids")
    if positions is None:
        positions = (call.mask.long().cumsum(1) - 1).clamp(min=0)
    others = {**call.others, **others, "position_ids": take(positions)}
    others["attention_mask"] = mask.long()
    for name in _COLUMNS:
        if others.get(name) is not None:
            others[name] = take(others[name])
    return replace(call, ids=take(call.ids).where(mask, _find_filler(call)), others=others)


def _find_filler(call: GenerateCall) -> int:
    """An id of padding that stands for no image."""
    taken = {find_placeholder(call.model, name) for name in call.others["mm_encoder_outputs"]}
    return next(value for value in range(len(taken) + 1) if value not in taken)
