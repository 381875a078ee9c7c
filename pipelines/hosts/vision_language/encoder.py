"""The vision encoder in one call of `generate`: all of its hooks, which this class alone makes.

While `generate` encodes its images, the tower computes less: of smaller images (`pixels`), fewer
patches (`patches`), or tokens merged in front of its layers, each a target of
`mmaccel.pipelines.hosts.vision_language.tower_run`. Behind the tower all places are there again; of
the features that are then equal, one stays in the prompt.

Merged tokens: a hook in front of attention adds the logarithm of how many patches each key stands
for, as its mask (proportional attention: D. Bolya et al., "Token Merging: Your ViT But Faster",
ICLR 2023, arXiv:2210.09461, section 3.2). The class token, and patches that the tower's mask hides,
stay. Each row is reduced alone. Only layers whose states the model uses count: with
`vision_feature_layer=-2` the last one receives what the one before it had.

Departures: the attention of flash and flex kernels takes no bias; a reduced tower runs sdpa.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmaccel.errors import UnsupportedModelError
from mmaccel.pipelines.hosts.layers.attention_name import (
    attention_named,
    find_configs,
    own_attention,
)
from mmaccel.pipelines.hosts.prompt_cuts.columns import ChosenColumns, take_states
from mmaccel.pipelines.hosts.vision_language.patches import prune_pack, prune_rows
from mmaccel.pipelines.hosts.vision_language.pixels import shrink_pack, shrink_rows
from mmaccel.pipelines.hosts.vision_language.places import find_rows
from mmaccel.pipelines.hosts.vision_language.tower_run import TowerRun, find_targets, join_targets
from mmaccel.pipelines.hosts.vision_language.towers import (
    VisionTower,
    describe_features,
    describe_tower,
    find_attentions,
    find_side,
    find_tower,
)
from mmaccel.pipelines.hosts.vision_language.visuals import Visual, find_placeholder, find_seeds
from mmaccel.reduction.visual_tokens.attention_mass import attention_mass
from mmaccel.reduction.visual_tokens.context import Queries, make_context
from mmaccel.reduction.visual_tokens.contract import TokenReducer
from mmaccel.reduction.visual_tokens.downsample_pixels import DownsamplePixels

Stage = Callable[[TowerRun, Any, Tensor, dict[str, Any]], tuple[Tensor, dict[str, Any]]]
_WITH_BIAS = {"sdpa", "eager"}
_PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def find_depth(model: Any, inputs: Mapping[str, Any]) -> int:
    """How many layers of the tower have run where the model takes its states."""
    depth = len(find_attentions(find_tower(model)))
    chosen = inputs.get("vision_feature_layer")
    if chosen is None:
        chosen = getattr(model.config, "vision_feature_layer", None)
    if chosen is None:
        return depth
    chosen = [chosen] if isinstance(chosen, int) else chosen
    return max(index if index >= 0 else depth + 1 + index for index in chosen)


class EncoderCall:
    """The encoder of one call, inside `with`.

    Args:
        inputs: what `generate` was called with.
        method: what it computes less by; None: nothing.
        seeds: of the prompt's rows, before the call's sampling is known: 0 for a policy without
            one.
        records: whether a method behind it reads its keys and attention.
    """

    def __init__(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        method: TokenReducer | None = None,
        seeds: Sequence[int] = (),
        records: bool = False,
    ) -> None:
        self.inputs = inputs
        self.runs: dict[str, TowerRun] = {}  # the tower's calls, by modality
        # by layer, what its attention read: "q" and "k", [R, S', H, D]
        self.noted: dict[int, dict[str, Tensor]] = {}
        self.counts = (0, 0)  # patches of all images, and those that the tower computed last
        self._model, self._method, self._seeds, self._records = model, method, seeds, records
        self._tower = find_tower(model)
        self._known = describe_tower(model) or VisionTower()
        self._waiting = [name for name, key in _PIXELS.items() if inputs.get(key) is not None]
        self._run: TowerRun | None = None
        self._hooks = ExitStack()
        self._depth = 0
        self._stage: Stage | None = None
        self._before: tuple[int, ...] = ()  # layers in front of which tokens go
        self._met = False  # whether one of them has run
        is_packed = self._known.patches == "packed"
        if isinstance(method, DownsamplePixels):
            self._stage = shrink_pack if is_packed else shrink_rows
        elif method is not None and method.stage == "pixels":
            self._stage = prune_pack if is_packed else prune_rows
            self._before = () if is_packed else (0,)
        elif method is not None:
            self._depth = find_depth(model, inputs)
            self._before = method.layers_of(self._depth)

    def __enter__(self) -> EncoderCall:
        if self._method is None and not self._records:
            return self
        tower = self._tower
        attentions = find_attentions(tower)
        layers = [m for m in tower.modules() if any(child in attentions for child in m.children())]
        with ExitStack() as hooks:  # which go again if one cannot be made
            self._register(hooks, tower, layers, attentions)
            self._hooks = hooks.pop_all()
        return self

    def _register(
        self, hooks: ExitStack, tower: Any, layers: Sequence[Any], attentions: Sequence[Any]
    ) -> None:
        def add(handle: Any) -> None:
            hooks.callback(handle.remove)

        add(tower.register_forward_pre_hook(self._begin, with_kwargs=True))
        add(tower.register_forward_hook(self._end))
        for index, (layer, attention) in enumerate(zip(layers, attentions, strict=True)):
            if self._records or index + 1 in self._before:
                for name in ("q", "k"):
                    last = getattr(attention, f"{name}_norm", None)
                    if last is None:
                        last = getattr(attention, f"{name}_proj")
                    hook = partial(self._note, index, name, attention)
                    add(last.register_forward_hook(hook))
            if index in self._before:
                hook = partial(self._shorten, index)
                add(layer.register_forward_pre_hook(hook, with_kwargs=True))
            if self._before:
                add(attention.register_forward_pre_hook(self._weigh, with_kwargs=True))
        if self._before and own_attention(tower.config) not in _WITH_BIAS:
            hooks.enter_context(attention_named(find_configs(tower), "sdpa"))

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()

    @property
    def changed(self) -> bool:
        """Whether the tower computed less."""
        return any(run.merges for run in self.runs.values())

    def copies(self, ids: Tensor) -> int:
        """Copies of each row of the call's prompt in a batch `[B, T]` (`num_return_sequences`)."""
        prompt = self.inputs.get("input_ids")
        return 1 if prompt is None else len(ids) // len(prompt)

    def find_left(self, visuals: Sequence[Visual]) -> list[tuple[Tensor, Tensor]] | None:
        """Which features of images, or videos, of one modality are left in the prompt: of each
        `[n]` bool, True for features that are no place, and `[n]` float32, how many each stands
        for; None: all stay. UnsupportedModelError to drop features that were pooled or resized
        after the tower.
        """
        run = self.runs.get(visuals[0].modality)
        if run is None or run.target is None:
            return None
        left = list[tuple[Tensor, Tensor]]()
        for visual in visuals:
            places = visual.places
            is_place = (places.source >= 0) & places.is_own
            if not places.is_own and getattr(self._method, "features", "auto") == "merged":
                raise UnsupportedModelError(
                    f"{self._method!r}: expected {visual.modality} features that are tokens of "
                    "the encoder, received features that were pooled or resized after it; give "
                    'features="auto"'
                )
            target = run.target.to(is_place.device)  # of all places of the tower
            source = places.source.where(is_place, 0)
            stands = target[source]  # [n], the place that stands for each feature's
            size = target.bincount(minlength=len(target)).float()[stands]
            # of the features of one place its own is left (ranks 0 to n - 1) or, where that was
            # cut off, the first of the others (n to 2n - 1); what is no place comes last
            n = len(stands)
            rank = torch.arange(n, device=stands.device) + n * (stands != source)
            rank = rank.where(is_place, 2 * n)
            first = rank.new_full(target.shape, 2 * n).scatter_reduce(0, stands, rank, "amin")
            left.append(((rank == first[stands]) | ~is_place, size.where(is_place, 1.0)))
        return None if all(bool(stays.all()) for stays, _ in left) else left

    # ------------------------------------------------------------------ the tower's hooks

    def _begin(self, _tower: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """In front of the tower: open its run, and change what it receives."""
        self._run = None
        if not self._waiting:  # a call inside the call, or whole images for a loop of transformers'
            return None
        modality = self._waiting.pop(0)
        given = dict(given)
        pixels = given.pop("pixel_values") if "pixel_values" in given else args[0]
        run = self._run = self.runs[modality] = self._open(modality, pixels, given)
        if self._stage is None:
            return None
        pixels, given = self._stage(run, self._method, pixels, given)
        return (pixels, *args[1:]), given

    def _open(self, modality: str, pixels: Tensor, given: Mapping[str, Any]) -> TowerRun:
        unit = describe_features(self._model).unit(self._model.config)
        if self._known.patches == "packed":
            grid = (1, len(pixels) // unit**2)  # of features
            seen = torch.ones(grid, dtype=torch.bool, device=pixels.device)
            seeds = self._seeds[:1]
        else:
            side = find_side(self._tower)
            grid = (pixels.shape[-2] // side, pixels.shape[-1] // side)
            n_special = int(self._known.has_class_token)
            seen = pixels.new_ones(len(pixels), n_special + grid[0] * grid[1], dtype=torch.bool)
            mask = given.get("patch_attention_mask")
            if mask is not None:
                seen[:, n_special:] = mask.flatten(1)
            seeds = [0] * len(pixels)
            if self._method is not None:
                ids = self.inputs.get("input_ids")
                owners = list[int]()
                if ids is not None:
                    placeholder = find_placeholder(self._model, modality)
                    owners = (ids == placeholder).nonzero()[:, 0].tolist()
                rows = find_rows(self._model, self.inputs, modality, len(pixels), owners)
                seeds = find_seeds(rows, self._seeds)
        numbers = torch.tensor(seeds, device=pixels.device, dtype=torch.int64)
        weighs = self._stage is None
        return TowerRun(self._tower, self._known, unit, numbers, grid, seen, weighs)

    def _note(
        self, layer: int, name: str, attention: Any, _part: Any, _args: Any, states: Tensor
    ) -> None:
        """Keep queries or keys, `[R, S', H * D]` or `[R * S', H, D]`; of images before videos."""
        if self._run is not None:
            shape = len(self._run.is_seen), -1, attention.num_heads, attention.head_dim
            self.noted.setdefault(layer, {}).setdefault(name, states.detach().reshape(shape))

    def _weigh(self, _attention: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """In front of attention: what its keys stand for, as its mask."""
        run = self._run
        if run is None or run.mask is None:
            return None
        return args, {**given, "attention_mask": run.mask}

    def _shorten(
        self, index: int, _layer: Any, args: tuple[Any, ...], given: dict[str, Any]
    ) -> Any:
        """In front of a layer: the columns of the tokens that are left."""
        run = self._run
        if run is None:
            return None
        self._met = True
        hidden = args[0]
        if self._stage is None and self._method is not None:
            hidden = self._merge(run, self._method, index, hidden)
        level = run.levels[-1]
        if level.first != index:
            return None
        # columns of the level before, of the tokens that are left
        columns = run.levels[-2].column.gather(1, level.columns.index)
        run.mask = run.bias(hidden.dtype)[:, None, None].expand(-1, 1, columns.shape[1], -1)
        return (take_states(hidden, columns), *args[1:]), given

    def _merge(self, run: TowerRun, method: TokenReducer, index: int, hidden: Tensor) -> Tensor:
        """In front of a layer: the states `[R, S', C]` with those of merged tokens."""
        patches = ChosenColumns.of(run.take(run.is_patch))  # without the class token and padding
        where = patches.index.where(patches.valid, -1)
        token = run.levels[-1].columns.index.gather(1, patches.index)  # of the row
        place = token - run.n_special  # of the grid
        noted = self.noted.pop(index - 1)
        bias = run.bias(torch.float32)
        x = patches.take(hidden)

        def attention(layer: int, queries: Queries, per_head: bool) -> Tensor:
            q, k = noted["q"].transpose(1, 2), noted["k"].transpose(1, 2)
            scale = q.shape[-1] ** -0.5
            return attention_mass(q[:, :, :1], k, where, scale=scale, bias=bias, per_head=per_head)

        context = make_context(
            x,
            patches.valid,
            row=place // run.grid[1],
            column=place % run.grid[1],
            size=patches.take(run.size),
            initial=run.count(0),
            seed=run.seeds,
            layer=index,
            depth=self._depth,
            keys=lambda layer: patches.take(noted["k"]),
            attention=attention if run.n_special else None,
            queries=("cls",),
        )
        plan = method.plan(context)
        run.merge(index, token, patches.valid, find_targets(plan))
        return patches.put(hidden, x, plan)

    def _end(self, _tower: Any, _args: Any, output: Any) -> Any:
        """Behind the tower: its states, or features, at all places."""
        run, self._run = self._run, None
        if run is None:
            return None
        if (self._before and not self._met) or (self._records and not self.noted):
            raise UnsupportedModelError(
                "visual_tokens: expected a vision tower whose layers call their hooks, received "
                "one that was compiled without them; call torch._dynamo.reset(), or attach before "
                "its first call"
            )
        is_packed = self._known.patches == "packed"
        block = run.unit**2 if is_packed else 1
        before, after = (block * int(run.count(level).sum()) for level in (0, -1))
        self.counts = self.counts[0] + before, self.counts[1] + after
        if not run.merges:
            return None
        if is_packed:
            column = run.levels[-1].column[0]
            output.pooler_output = output.pooler_output[column]
            if getattr(output, "deepstack_features", None) is not None:
                output.deepstack_features = [deep[column] for deep in output.deepstack_features]
            return output
        features = getattr(self._method, "features", "auto")
        if self._stage is None and features != "all" and describe_features(self._model).are_tokens:
            run.target = join_targets(run.levels[-1].target[:, run.n_special :] - run.n_special)
        depth = len(find_attentions(self._tower))
        output.last_hidden_state = run.restore(output.last_hidden_state, depth)
        hidden = getattr(output, "hidden_states", None)
        if hidden is not None:  # the first is what entered layer 0; None for those not asked for
            output.hidden_states = tuple(
                None if states is None else run.restore(states, index - 1)
                for index, states in enumerate(hidden)
            )
        return output
