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
from mmaccel.demo.scenes_vqa.data import (
    CANVAS,
    FIRST_SIGN,
    SIGN_HEIGHT,
    SIGN_WIDTH,
    TILE,
    TRAIN_SEED,
    VALIDATION_SEED,
    BusyScene,
    make_examples,
)
from mmaccel.demo.scenes_vqa.processor import PATCH
from scripts.training.loop import Batch, Task

SIZES: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4
)
GRID = TILE // PATCH  # patches along a view
TILES = CANVAS // TILE  # tiles along an image
VIEWS = 1 + TILES * TILES
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
SHOWN = 1 / 8  # least share of a patch that an object covers to be its label
_IDS = FIRST_SIGN + 2
_PAIRS = len(COLOURS) * (len(SHAPES) + 1)
_STEPS = 16  # units of `right` and `down` in a pixel
_REACH = 10.0  # scale of offsets, pixels
_PLACE_WEIGHT = 20.0  # an error of half a patch then costs 0.05 nats


def split_views(images: Tensor) -> Tensor:
    """The views of images [B, 3, 80, 80] uint8 that LLaVA-NeXT's tower reads: [B, 5, 3, 40, 40]
    float32, normalised, the whole image at half size, then the tiles row by row; as the processor
    gives them (Liu et al., 2024, "LLaVA-NeXT: improved reasoning, OCR, and world knowledge").
    """
    whole = images.float()
    for sides in ((1, TILES), (TILES, 1)):  # PIL rounds after each direction
        whole = (avg_pool2d(whole, sides) + 0.5).floor()
    views = torch.cat([whole[:, None], cut_tiles(images.float(), TILE)], 1)
    return (views / 255 - 0.5) / 0.5


def cut_tiles(images: Tensor, side: int) -> Tensor:
    """The tiles of images [B, C, n side, n side], row by row: [B, n n, C, side, side]."""
    tiles = images.unflatten(2, (-1, side)).unflatten(4, (-1, side))
    return tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)


def label_patches(scenes: list[BusyScene], maps: Tensor) -> Tensor:
    """What every patch of every view shows, from maps [B, 80, 80] of `render`.

    Returns:
        [B, 5, 100, 9] int16, values of `LABELS`, `UNSAID` where there are none. `right` and `down`
        lead from the patch to the object's centre, in sixteenths of a pixel of the image.
    """
    shares = one_hot(maps.long(), _IDS)[..., 1:].permute(0, 3, 1, 2).float()
    fine = avg_pool2d(shares, PATCH)
    views = torch.cat([avg_pool2d(fine, TILES)[:, None], cut_tiles(fine, GRID)], 1)
    most, ids = views.flatten(3).max(2)  # [B, 5, 100]
    ids = torch.where(most >= SHOWN, ids + 1, 0)
    tables = torch.stack([_table(scene) for scene in scenes])
    labels = tables[torch.arange(len(scenes))[:, None, None], ids]  # [B, 5, 100, 9]
    labels[:, 0, :, 4:6] = UNSAID  # digits cannot be read at half size
    x, y, side = _places()
    right, down = labels[..., 7] / _STEPS - x, labels[..., 8] / _STEPS - y
    is_inside = (right.abs() <= side / 2) & (down.abs() <= side / 2)
    ways = torch.stack([is_inside.float(), right * _STEPS, down * _STEPS], -1).round()
    labels[..., 6:] = torch.where((ids > 0)[..., None], ways, 0).to(labels.dtype)
    return labels


def _table(scene: BusyScene) -> Tensor:
    """Labels by number in the map, [10, 9] int16; the last two are the centre's place."""
    table = torch.full((_IDS, len(LABELS)), UNSAID, dtype=torch.int16)
    table[:, :2] = 0
    for k, thing in enumerate(scene.objects):
        colour, shape = COLOURS.index(thing.colour) + 1, SHAPES.index(thing.shape) + 1
        dot = 0 if thing.dot is None else COLOURS.index(thing.dot) + 1
        row = [colour, shape, int(thing.size == "large"), dot, UNSAID, UNSAID, 0]
        table[k + 1] = torch.tensor([*row, round(thing.x * _STEPS), round(thing.y * _STEPS)])
    for k, sign in enumerate(scene.signs):
        x, y = sign.x + SIGN_WIDTH / 2, sign.y + SIGN_HEIGHT / 2
        row = [COLOURS.index(sign.colour) + 1, SIGN_SHAPE, UNSAID, UNSAID]
        row += [*divmod(sign.number, 10), 0, round(x * _STEPS), round(y * _STEPS)]
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
    """A `CLIPVisionModel` with one linear reader of patches and one of the class token."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        width = tower.config.hidden_size
        self.tower = tower
        self.norm = nn.LayerNorm(width)
        self.patches = nn.Linear(width, sum(CLASSES.values()) + 2)
        self.places = nn.Linear(width, 4)
        self.view = nn.Linear(width, _PAIRS)

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
            total = total + cross_entropy(logits[name][said], labels[..., k][said])
        is_there = labels[..., 1] > 0
        wanted = labels[..., 7:][is_there] / (_STEPS * _REACH)
        total = total + smooth_l1_loss(offsets[is_there], wanted, beta=0.1)
        total = total + (self.place_error(states) / GRID).square().mean() * _PLACE_WEIGHT
        return total + 4 * binary_cross_entropy_with_logits(pairs, pairs_shown(labels))


def pairs_shown(labels: Tensor) -> Tensor:
    """Which pairs of colour and shape (signs last) a view shows, [N, 42] of 0 and 1."""
    colour, shape = labels[..., 0].long(), labels[..., 1].long()
    pair = torch.where(shape > 0, (colour - 1) * (len(SHAPES) + 1) + shape, 0)
    return one_hot(pair, _PAIRS + 1).amax(1)[:, 1:].float()


def tower_config() -> Any:
    """The sizes of the tower."""
    from transformers import CLIPVisionConfig

    width = SIZES["hidden_size"]
    shape: dict[str, Any] = {"image_size": TILE, "patch_size": PATCH, "projection_dim": width}
    return CLIPVisionConfig(hidden_act="gelu", **shape, **SIZES)


class Tower(Task):
    """The first stage: images to labels of patches."""

    def __init__(self, checks: int = 96) -> None:
        self.checks = [_views_and_labels(VALIDATION_SEED, range(checks))]

    def build(self, before: Path | None) -> Any:
        from transformers import CLIPVisionModel

        return TowerReader(CLIPVisionModel(tower_config()))

    def batch(self, step: int, size: int) -> Batch:
        """Views [5 B, 3, 40, 40] and labels [5 B, 100, 9] of batch `step`."""
        return _views_and_labels(TRAIN_SEED, range(step * size, (step + 1) * size))

    def loss(self, model: Any, ids: Tensor, labels: Tensor, step: int) -> Tensor:
        loss: Tensor = model.loss(model(ids), labels)
        return loss

    def save(self, model: Any, folder: Path) -> None:
        super().save(model.tower, folder)

    def validate(self, model: Any, device: str) -> dict[str, float]:
        """Loss, and shares of patches that are read rightly (ground aside), by label."""
        ((views, labels),) = self.checks
        labels = labels.to(device)
        states = torch.cat([model(part.to(device)) for part in views.split(80)])
        logits, _, _ = model.read(states)
        figures = {"validation": float(model.loss(states, labels))}
        for k, name in enumerate(CLASSES):
            asked = (labels[..., 1] > 0) & (labels[..., k] != UNSAID)
            is_right = logits[name].argmax(-1) == labels[..., k]
            figures[name] = float(is_right[asked].float().mean())
        return figures


def _views_and_labels(seed: int, indices: range) -> Batch:
    examples = make_examples(seed, indices, per_kind=0)
    labels = label_patches(examples.scenes, examples.maps)
    return split_views(examples.images).flatten(0, 1), labels.flatten(0, 1)
