"""The vision tower of `scenes-vqa`, trained to say of every patch what stands there.

A patch's label comes from the map of the image: colour and shape of the object, its size, the
colour of the dot on it, where its centre lies, and both digits of a sign. Every patch also says
where it lies, in the whole image or, elsewhere among its features, in its tile: a language model
that averages over the patches of an object can then read on which side of the image it is. The
class token says which pairs of colour and shape its view shows. The language model then reads what
is there instead of learning to see from answers alone (compare LocCa, Wan et al., 2024, arXiv
2403.19596).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    avg_pool2d,
    binary_cross_entropy_with_logits,
    cross_entropy,
    one_hot,
    smooth_l1_loss,
)

from mmaccel.demo.scenes.layout import COLOURS, SHAPES
from mmaccel.demo.scenes_vqa.data import TRAIN_SEED, VALIDATION_SEED, make_examples
from mmaccel.demo.scenes_vqa.layout import TILE, BusyScene
from mmaccel.demo.scenes_vqa.render import FIRST_SIGN
from mmaccel.demo.scenes_vqa.views import GRID, PATCH, TILES, VIEWS, split_views

WIDTH, DEPTH, HEADS, INNER = 128, 4, 4, 384
SIGN_SHAPE = len(SHAPES) + 1
CLASSES = {  # label of a patch: number of values
    "colour": len(COLOURS) + 1,
    "shape": len(SHAPES) + 2,
    "size": 2,
    "dot": len(COLOURS) + 1,
    "tens": 10,
    "units": 10,
    "centre": 2,
}
LABELS = (*CLASSES, "right", "down")
UNSAID = -1  # a label that a patch does not have
_IDS = FIRST_SIGN + 2
_STEPS = 16  # units of `right` and `down` in a pixel
_SHOWN = 1 / 8  # least share of a patch that an object covers to be its label
_REACH = 10.0  # scale of offsets, pixels
_PLACE_WEIGHT = 20.0  # an error of half a patch then costs 0.05 nats


def label_patches(scenes: list[BusyScene], maps: Tensor) -> Tensor:
    """What every patch of every view shows.

    Args:
        scenes: B scenes.
        maps: [B, 80, 80] uint8, of `render`.

    Returns:
        [B, 5, 100, 9] int16, values of `LABELS`, `UNSAID` where there are none. `right` and `down`
        lead from the patch to the object's centre, in sixteenths of a pixel of the image.
    """
    shares = one_hot(maps.long(), _IDS)[..., 1:].permute(0, 3, 1, 2).float()
    fine = avg_pool2d(shares, PATCH)
    coarse = avg_pool2d(fine, TILES)
    tiles = fine.unflatten(2, (TILES, GRID)).unflatten(4, (TILES, GRID))
    tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    share = torch.cat([coarse[:, None], tiles], 1).flatten(3)  # [B, 5, 9, 100]
    most, ids = share.max(2)
    ids = torch.where(most >= _SHOWN, ids + 1, 0)
    rows = torch.arange(len(scenes))[:, None, None]
    tables = torch.stack([_table(s) for s in scenes])
    labels = tables[rows, ids]  # [B, 5, 100, 9]
    labels[:, 0, :, 4:6] = UNSAID  # digits cannot be read at half size
    x, y, side = _places()
    right, down = labels[..., 7] / _STEPS - x, labels[..., 8] / _STEPS - y
    inside = (right.abs() <= side / 2) & (down.abs() <= side / 2)
    is_there = ids > 0
    labels[..., 6] = torch.where(is_there, inside.to(labels.dtype), 0)
    labels[..., 7] = torch.where(is_there, (right * _STEPS).round().to(labels.dtype), 0)
    labels[..., 8] = torch.where(is_there, (down * _STEPS).round().to(labels.dtype), 0)
    return labels


def _table(scene: BusyScene) -> Tensor:
    """Labels by number in the map, [10, 9] int16; the last two are the centre's place."""
    table = torch.full((_IDS, len(LABELS)), UNSAID, dtype=torch.int16)
    table[:, :2] = 0
    for k, thing in enumerate(scene.things):
        colour, shape = COLOURS.index(thing.colour) + 1, SHAPES.index(thing.shape) + 1
        dot = 0 if thing.dot is None else COLOURS.index(thing.dot) + 1
        row = [colour, shape, int(thing.size == "large"), dot, UNSAID, UNSAID, 0]
        row += [round(thing.x * _STEPS), round(thing.y * _STEPS)]
        table[k + 1] = torch.tensor(row)
    for k, sign in enumerate(scene.signs):
        row = [COLOURS.index(sign.colour) + 1, SIGN_SHAPE, UNSAID, UNSAID]
        row += [*divmod(sign.number, 10), 0]
        row += [round((sign.x + 7.5) * _STEPS), round((sign.y + 5.5) * _STEPS)]
        table[FIRST_SIGN + k] = torch.tensor(row)
    return table


def _places() -> tuple[Tensor, Tensor, Tensor]:
    """Centres x, y [5, 100] of patches in pixels of the image, and their sides [5, 1]."""
    axis = (torch.arange(GRID) + 0.5) * PATCH
    x, y = axis.repeat(GRID), axis.repeat_interleave(GRID)
    corners = [(TILE * c, TILE * r) for r in range(TILES) for c in range(TILES)]
    xs = torch.stack([x * TILES, *(x + c for c, _ in corners)])
    ys = torch.stack([y * TILES, *(y + r for _, r in corners)])
    sides = torch.tensor([PATCH * TILES] + [PATCH] * (VIEWS - 1))[:, None]
    return xs, ys, sides


class TowerReader(nn.Module):
    """A vision tower with one linear reader of patches and one of the class token.

    Args:
        tower: a `CLIPVisionModel`.
    """

    def __init__(self, tower: Any) -> None:
        super().__init__()
        width = tower.config.hidden_size
        self.tower = tower
        self.norm = nn.LayerNorm(width)
        self.patches = nn.Linear(width, sum(CLASSES.values()) + 2)
        self.places = nn.Linear(width, 4)
        self.view = nn.Linear(width, len(COLOURS) * (len(SHAPES) + 1))

    def forward(self, views: Tensor) -> Tensor:
        """Hidden states after the last layer, [N, 101, 128], of views [N, 3, 40, 40]."""
        states: Tensor = self.tower(views, output_hidden_states=True).hidden_states[-1]
        return states

    def read(self, states: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Logits of `CLASSES` [N, 100, ·], offsets [N, 100, 2], and pairs shown [N, 42]."""
        states = self.norm(states)
        *classes, offsets = self.patches(states[:, 1:]).split([*CLASSES.values(), 2], -1)
        return dict(zip(CLASSES, classes, strict=True)), offsets, self.view(states[:, 0])

    def place_error(self, states: Tensor) -> Tensor:
        """How far off each patch of N views, five of each image, places itself, [N, 100, 4].

        In patches from the middle: column and row in the whole image, 0 in a tile; then those in a
        tile, 0 in the whole image.
        """
        axis = torch.arange(GRID, device=states.device, dtype=states.dtype) - (GRID - 1) / 2
        own = torch.stack([axis.repeat(GRID), axis.repeat_interleave(GRID)], 1)
        is_whole = torch.arange(len(states), device=states.device) % VIEWS == 0
        whole = torch.where(is_whole[:, None, None], own, 0.0)
        wanted = torch.cat([whole, own - whole], 2)
        error: Tensor = self.places(self.norm(states[:, 1:])) * (GRID / 2) - wanted
        return error

    def loss(self, states: Tensor, labels: Tensor) -> Tensor:
        """The sum of all readers' losses, nats, for labels [N, 100, 9]."""
        logits, offsets, pairs = self.read(states)
        labels = labels.long()
        total = offsets.new_zeros(())
        for k, name in enumerate(CLASSES):
            said = labels[..., k] != UNSAID
            wanted = labels[..., k][said]
            total = total + cross_entropy(logits[name][said], wanted)
        is_there = labels[..., 1] > 0
        wanted = labels[..., 7:][is_there] / (_STEPS * _REACH)
        total = total + smooth_l1_loss(offsets[is_there], wanted, beta=0.1)
        total = total + (self.place_error(states) / GRID).square().mean() * _PLACE_WEIGHT
        return total + 4 * binary_cross_entropy_with_logits(pairs, pairs_shown(labels))

    def save_pretrained(self, folder: Path) -> None:
        """Writes the tower alone."""
        self.tower.save_pretrained(folder)


def pairs_shown(labels: Tensor) -> Tensor:
    """Which pairs of colour and shape (signs last) a view shows, [N, 42] of 0 and 1."""
    colour, shape = labels[..., 0].long(), labels[..., 1].long()
    pair = torch.where(shape > 0, (colour - 1) * (len(SHAPES) + 1) + shape, 0)
    shown = one_hot(pair, len(COLOURS) * (len(SHAPES) + 1) + 1).amax(1)
    return shown[:, 1:].float()


def build_tower() -> Any:
    """A new `CLIPVisionModel` with random weights, float32."""
    from transformers import CLIPVisionModel

    return CLIPVisionModel(tower_config())


def tower_config() -> Any:
    """The sizes of the tower."""
    from transformers import CLIPVisionConfig

    return CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        image_size=TILE,
        patch_size=PATCH,
        projection_dim=WIDTH,
        hidden_act="gelu",
    )


class Tower:
    """The first stage: images to labels of patches; see `scripts.training.generator.Task`."""

    def __init__(self, checks: int = 96) -> None:
        self.options: dict[str, Any] = {}
        self.checks = _views_and_labels(VALIDATION_SEED, range(checks))

    def build(self, start: str | None) -> Any:
        """See `Task`; `start` is the work folder of another run."""
        model = TowerReader(build_tower())
        if start is not None:
            file = Path(start) / "generator.pt"
            state = torch.load(file, map_location="cpu", weights_only=True)["average"]
            own = model.state_dict()
            known = {name: w for name, w in state.items() if own[name].shape == w.shape}
            model.load_state_dict(known, strict=False)
        return model

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Views [5 B, 3, 40, 40] and labels [5 B, 100, 9] of batch `step`."""
        return _views_and_labels(TRAIN_SEED, range(step * size, (step + 1) * size))

    def distinct(self, steps: int, size: int) -> int:
        """See `Task`; every image is drawn once."""
        return steps * size

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        loss: Tensor = model.loss(model(ids), labels)
        return loss

    @torch.no_grad()
    def validate(self, model: Any, device: str) -> dict[str, float]:
        """Loss, and shares of patches that are read rightly (ground aside), by label."""
        model.eval()
        views, labels = (t.to(device) for t in self.checks)
        states = torch.cat([model(v) for v in views.split(80)])
        logits, offsets, _ = model.read(states)
        found = {"validation": float(model.loss(states, labels))}
        is_there = labels[..., 1] > 0
        for k, name in enumerate(CLASSES):
            asked = is_there & (labels[..., k] != UNSAID)
            right = logits[name].argmax(-1) == labels[..., k]
            found[name] = float(right[asked].float().mean())
        wrong = offsets[is_there] * _REACH - labels[..., 7:][is_there] / _STEPS
        found["place_patches"] = float(model.place_error(states).abs().mean())
        found["offset_pixels"] = float(wrong.abs().mean())
        model.train()
        return found


def _views_and_labels(seed: int, indices: range) -> tuple[Tensor, Tensor]:
    examples = make_examples(seed, indices, per_kind=0)
    labels = label_patches(examples.scenes, examples.maps)
    return split_views(examples.images).flatten(0, 1), labels.flatten(0, 1)
