"""Moving scenes: from a description to frames.

Grounds and objects are those of `scenes` (`draw_background` and `paint`). The ground, its light and
its texture stay while objects and their shadows move; every frame has film grain of its own.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmaccel.demo.moving_scenes.layout import N_FRAMES, MovingScene
from mmaccel.demo.scenes.layout import CANVAS, Scene, SceneObject
from mmaccel.demo.scenes.render import column, draw_background, paint, resize

Noise = tuple[np.ndarray, np.ndarray, np.ndarray]


def draw_noise(rng: np.random.Generator) -> Noise:
    """The noise of one clip: grain [F, 64, 64], middle [32, 32], low [8, 8], normal, float32."""
    return (
        rng.standard_normal((N_FRAMES, CANVAS, CANVAS), dtype=np.float32),
        rng.standard_normal((32, 32), dtype=np.float32),
        rng.standard_normal((8, 8), dtype=np.float32),
    )


def render(scenes: list[MovingScene], noises: list[Noise]) -> Tensor:
    """Draws a batch of clips, on torch's default device.

    Args:
        scenes: B descriptions.
        noises: one `draw_noise` triple per description.

    Returns:
        Frames [B, F, 3, 64, 64], uint8. A clip does not depend on its batch.
    """
    grain, middle, low = (torch.as_tensor(np.stack(part)) for part in zip(*noises, strict=True))
    axis = torch.arange(CANVAS, dtype=torch.float32) + 0.5
    xs, ys = axis[None, :], axis[:, None]
    light = column([scene.light for scene in scenes])
    lx, ly = light.cos(), light.sin()
    grounds = [_ground(scene) for scene in scenes]
    still = draw_background(grounds, xs, ys, middle, resize(low, CANVAS))
    tone = 1 + 0.14 * ((xs - CANVAS / 2) * lx + (ys - CANVAS / 2) * ly) / (CANVAS / 2)
    still = still * tone[:, None]
    clips = still[:, None].repeat(1, N_FRAMES, 1, 1, 1)  # [B, F, 3, h, w]
    frames = clips.flatten(0, 1)
    flat = torch.zeros(1, CANVAS, CANVAS, dtype=torch.float32)
    for number in (1, 0):  # the first object is painted last
        shown = [
            (b * N_FRAMES + f, scene, f)
            for b, scene in enumerate(scenes)
            for f in range(N_FRAMES)
            if number < len(scene.actors) and scene.actors[number].seen[f]
        ]
        if not shown:
            continue
        rows = torch.tensor([row for row, _, _ in shown], dtype=torch.int64)
        of_clip = rows // N_FRAMES
        frames[rows], _ = paint(
            frames[rows],
            [_object(scene, number, f) for _, scene, f in shown],
            xs,
            ys,
            lx=lx[of_clip],
            ly=ly[of_clip],
            speckle=flat.expand(len(shown), -1, -1),
        )
    strength = column([scene.grain for scene in scenes])[:, None]  # [B, 1, 1, 1]
    noisy = frames.unflatten(0, (len(scenes), N_FRAMES)) + (strength * grain)[:, :, None]
    return (noisy.clamp(0, 1) * 255).round().to(torch.uint8)


def _ground(scene: MovingScene) -> Scene:
    """The ground of a clip as a scene without objects."""
    return Scene(
        objects=(),
        relations=(),
        background=scene.background,
        light=scene.light,
        relief=scene.relief,
        phase=scene.phase,
        tilt=scene.tilt,
        grain=0.0,
    )


def _object(scene: MovingScene, number: int, frame: int) -> SceneObject:
    """One object as it stands in one frame."""
    actor = scene.actors[number]
    x, y = actor.track[frame]
    return SceneObject(
        colour=actor.colour,
        shape=actor.shape,
        size="small",
        x=x,
        y=y,
        radius=actor.radius,
        angle=actor.angle,
        texture="plain",
        texture_phase=0.0,
    )
