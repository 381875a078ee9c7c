"""Where a server listens: a taken port is refused before a model is loaded, a free one is said."""

from __future__ import annotations

import logging
import socket

import pytest

from mmaccel.cli import main
from tests.serving.conftest import Start


def test_a_taken_port_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port, "--model", "not-there"]) == 2
        said = capsys.readouterr().err
        assert f"received 127.0.0.1 and {port} (" in said and "--port 0 takes a free one" in said
    assert main(["serve", "--host", "no such host", "--model", "not-there"]) == 2
    assert "received no such host and 8000" in capsys.readouterr().err
    assert main(["serve", "--port", port, "--model", "not-there"]) == 2  # it is free now
    assert "model: expected" in capsys.readouterr().err


def test_the_log_has_the_port_that_was_taken(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="mmaccel.serving"):
        server = start()
        server.http.get("/health")
    assert f"http://127.0.0.1:{server.server.port}/v1" in caplog.text and server.server.port
