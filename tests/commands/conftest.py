"""Models are loaded once for all tests of this folder; most tests use the same one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from mmaccel import loading
from mmaccel.commands.jobs import codec as codec_job

_open_image_model = cache(loading.open_pipeline)
_open_media_model = cache(codec_job.open_pipe)


@pytest.fixture(autouse=True, scope="module")
def _load_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "open_pipeline", _open_image_model)
        patch.setattr(codec_job, "open_pipe", _open_media_model)
        yield
