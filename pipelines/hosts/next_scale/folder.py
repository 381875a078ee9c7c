"""A folder with a next-scale transformer: `config.json` and `model.safetensors`."""

from __future__ import annotations

from mmaccel.pipelines.hosts.next_scale.network import NextScaleConfig
from mmaccel.weight_folders import Schema

FOLDER = Schema(
    "a next-scale transformer",
    NextScaleConfig,
    "give a folder that `python -m scripts.training scenes-var` wrote",
    kind="NextScaleTransformer",
    option="model",
)
