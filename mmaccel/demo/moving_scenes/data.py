"""Captioned clips, clip `index` of `seed`; training, validation and evaluation share no clip."""

from __future__ import annotations

from mmaccel.demo.moving_scenes.caption import write_caption
from mmaccel.demo.moving_scenes.layout import N_FRAMES, draw_moving_scene
from mmaccel.demo.scenes.data import World

WORDS = (
    "a the and over on at moves rests hits appears vanishes slowly quickly left right up down "
    "red green blue yellow purple white circle square triangle ring grass sand water snow night"
).split()
MAX_WORDS = 24
TRAIN_SEED, VALIDATION_SEED, EVALUATION_SEED, TOKENIZER_SEED = 21, 22, 23, 24

CLIPS = World(draw_moving_scene, write_caption, N_FRAMES)
make_clips = CLIPS.make
make_captions = CLIPS.captions
