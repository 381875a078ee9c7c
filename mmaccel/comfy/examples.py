"""The example workflows that the pack brings, by name."""

from __future__ import annotations

from mmaccel.comfy.workflow import Use

_LOAD, _POLICY = Use("MMAccelLoadModel", 0), Use("MMAccelJacobiPolicy", 0)
_MADE = {"model": (0, "model"), "policy": (1, "policy")}
_STATS = (
    Use("MMAccelStats", 2, links={"stats": (2, "stats")}),
    Use("PreviewAny", 3, links={"source": (4, "text")}, room=260, width=560),
)
_CAPTIONS = "a red circle above a small blue square on grass\na large yellow star at night"

EXAMPLES: dict[str, tuple[Use, ...]] = {
    "mmaccel_generate": (
        _LOAD,
        _POLICY,
        Use("MMAccelGenerateImage", 1, {"prompt": _CAPTIONS, "seed": 7}, _MADE, room=220),
        Use("SaveImage", 2, links={"images": (2, "images")}, room=220),
        *_STATS,
    ),
    "mmaccel_compare": (
        _LOAD,
        _POLICY,
        Use("MMAccelCompare", 1, {"prompt": _CAPTIONS, "seed": 7}, _MADE, room=220),
        Use(
            "SaveImage",
            2,
            {"filename_prefix": "mmaccel_compare"},
            {"images": (2, "sheet")},
            room=320,
            width=560,
        ),
        *_STATS,
    ),
    "mmaccel_canvas": (
        Use("MMAccelLoadModel", 0, {"model": "scenes-masked"}),
        Use("MMAccelLosslessUnmaskPolicy", 0, {"order": "halton"}),
        Use("MMAccelGenerateImage", 1, {"seed": 7}, _MADE, room=220),
        Use("SaveImage", 2, links={"images": (2, "images")}, room=220),
        *_STATS,
    ),
    "mmaccel_speech": (
        Use("MMAccelLoadSpeechModel", 0),
        _POLICY,
        Use(
            "MMAccelGenerateSpeech",
            1,
            {"seed": 7},
            {"speech_model": (0, "speech_model"), "policy": (1, "policy")},
        ),
        Use("SaveAudio", 2, links={"audio": (2, "audio")}, room=120),
        *_STATS,
    ),
    "mmaccel_video": (
        Use("MMAccelLoadVideoModel", 0),
        _POLICY,
        Use(
            "MMAccelGenerateVideo",
            1,
            {"seed": 7},
            {"video_model": (0, "video_model"), "policy": (1, "policy"), "start": (6, "IMAGE")},
        ),
        Use("SaveVideo", 2, links={"video": (2, "video")}, room=320),
        *_STATS,
        Use("LoadImage", 0, room=320),
    ),
}
