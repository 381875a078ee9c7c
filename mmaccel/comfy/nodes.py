"""The table of nodes: a new node is one more entry here."""

from __future__ import annotations

from mmaccel.catalog import METHODS, POLICIES
from mmaccel.comfy.images import COMPARE, GENERATE
from mmaccel.comfy.loading import LOADERS
from mmaccel.comfy.methods import LAYER_INPUTS, REDUCE, layer_node, policy_node, reducer_node
from mmaccel.comfy.runs import SHOW
from mmaccel.comfy.speech import SPEAK
from mmaccel.comfy.table import NodeSpec
from mmaccel.comfy.text_to_image import TEXT_TO_IMAGE
from mmaccel.comfy.video import ANIMATE, PROMPTED
from mmaccel.comfy.vision import ANSWER

_LOAD = {word: loader.node() for word, loader in LOADERS.items()}
_IMAGES = (TEXT_TO_IMAGE, _LOAD[""], GENERATE, COMPARE)
_VIDEO = (_LOAD["TextToVideo"], PROMPTED, _LOAD["Video"], ANIMATE)
_OTHERS = (_LOAD["Speech"], SPEAK, *_VIDEO, _LOAD["Vision"], REDUCE, ANSWER, SHOW)
_METHODS = (
    *(policy_node(name) for name in POLICIES),
    *(reducer_node(name) for name in METHODS["visual_tokens"]),
    *(layer_node(each.name, name) for each in LAYER_INPUTS for name in METHODS[each.name]),
)
NODES: dict[str, NodeSpec] = {spec.id: spec for spec in (*_IMAGES, *_OTHERS, *_METHODS)}
