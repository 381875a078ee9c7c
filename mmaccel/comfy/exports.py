"""What the pack hands to ComfyUI: the table in one schema, the third where it is there.

ComfyUI never calls an entry point beside `NODE_CLASS_MAPPINGS`, so one of both is exported, never
both.
"""

from __future__ import annotations

from typing import Any

from mmaccel.comfy.nodes import NODES
from mmaccel.comfy.v1 import v1_exports
from mmaccel.comfy.v3 import has_v3, v3_exports


def find_exports() -> dict[str, Any]:
    """The names a pack's module needs, for the ComfyUI that imports it."""
    return v3_exports(NODES.values()) if has_v3() else v1_exports(NODES.values())
