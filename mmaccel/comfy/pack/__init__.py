"""The nodes of mmaccel, which must be installed."""

from mmaccel.comfy.schemas import find_exports

globals().update(find_exports())
