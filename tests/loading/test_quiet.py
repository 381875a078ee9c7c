"""Loading a whole model says nothing: no report of transformers reaches the terminal."""

from __future__ import annotations

import logging

from mmaccel import TextToImage


def test_loading_a_model_that_ships_warns_of_nothing() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        TextToImage.from_pretrained("scenes")
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []
