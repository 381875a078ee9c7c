"""Requests: an image depends on its own prompt and seed, whatever requests run next to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import (
    Jacobi,
    Request,
    RequestOutput,
    SamplingParams,
    TextToImage,
)
from mmaccel.errors import NumericsError
from mmaccel.pipelines.hosts.runner.engine import Engine
from mmaccel.results import Stats
from tests.fixtures.checkpoints import FAMILIES, SIZES, captions
from tests.fixtures.graph_replay import Replay
from tests.fixtures.lanes import mostly_slow
from tests.fixtures.tiny_model import CAPTIONS, break_weights, build_tiny, masked_beside_plain

Opener = Callable[[str], Path]


def requests_of(texts: list[str], n: int) -> list[Request]:
    return [Request(texts[k % len(texts)], 40 + k, tag=("job", k)) for k in range(n)]


def open_for_tokens(built: Opener, family: str, **options: Any) -> TextToImage:
    """A family's checkpoint, which renders nothing."""
    pipe = TextToImage.from_pretrained(built(family), size=SIZES.get(family), **options)
    pipe.image_model.render = lambda tokens, *_: [None]  # type: ignore[method-assign, assignment, list-item, misc]
    return pipe


def serve(pipe: TextToImage, requests: list[Request], **options: Any) -> dict[Any, RequestOutput]:
    """The delivered outputs by tag."""
    made: dict[Any, RequestOutput] = {}

    def deliver(served: RequestOutput) -> None:
        assert served.request in requests and served.request.tag not in made
        made[served.request.tag] = served

    options = {"params": pipe.image_model.params, "rows": 2, **options}
    stats = pipe.serve(requests, deliver=deliver, **options)
    assert len(made) == len(requests)
    assert stats.tokens == len(requests) * pipe.length
    assert stats.row_passes == sum(served.passes for served in made.values())
    return made


def assert_alone(pipe: TextToImage, made: dict[Any, RequestOutput], **options: Any) -> None:
    for served in made.values():
        own = pipe(served.request.prompt, seed=[served.request.seed], **options)
        assert served.tokens.equal(own.tokens[0]) and served.tokens.device.type == "cpu"
        assert served.image.tobytes() == own.images[0].tobytes()
        assert served.passes == int(own.passes[0])


def test_neither_batch_slots_nor_order_affect_an_image(pipe: TextToImage) -> None:
    requests = requests_of(CAPTIONS, 7)
    made = serve(pipe, requests, rows=3, policy=Jacobi(5))
    assert_alone(pipe, made, policy=Jacobi(5))
    reverse = serve(pipe, requests[::-1], rows=3, policy=Jacobi(5))
    for tag, served in made.items():
        assert reverse[tag].image.tobytes() == served.image.tobytes()
    assert len({served.image.tobytes() for served in made.values()}) == 7


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "llamagen-t2i"))
def test_every_family_admits_requests_during_a_run(
    built: Opener, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of a row follow the row to its batch slot, and those of rows that join are put next to
    those that run; also in captured passes. Tokens only.
    """
    pipe = open_for_tokens(built, family)
    requests = requests_of(captions(family), 4)
    alone = [pipe(one.prompt, seed=[one.seed], policy=Jacobi(40)).tokens for one in requests]
    assert len({tuple(own.flatten().tolist()) for own in alone}) == 4

    def check(made: dict[Any, RequestOutput]) -> None:
        assert all(made[one.tag].tokens.equal(own[0]) for one, own in zip(requests, alone))

    check(serve(pipe, requests, policy=Jacobi(40)))
    stats = join(pipe, requests, check)
    assert stats.passes < stats.row_passes
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "runner", lambda self, *_: Replay(self.sync_every, self.cache))
        check(serve(pipe, requests, policy=Jacobi(40), rows=3))
        stats = join(pipe, requests, check)  # reuses the graphs
        assert stats.passes < stats.row_passes
        assert len(pipe.engine.cache) == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_prompts_in_chunks(built: Opener, family: str) -> None:
    """Also of rows that join, whose inputs follow them while their prompts are not whole."""
    requests = requests_of(captions(family), 4)
    made = []
    for size in (None, 3):
        pipe = open_for_tokens(built, family, prefill_chunk_size=size)
        found = [serve(pipe, requests, policy=Jacobi(40))]
        join(pipe, requests, found.append)
        made.append([one[asked.tag].tokens.tolist() for one in found for asked in requests])
    assert made[0] == made[1]


def join(
    pipe: TextToImage,
    requests: list[Request],
    check: Callable[[dict[Any, RequestOutput]], None],
) -> Stats:
    """Serve a request, which the others join between passes."""
    waiting = requests[1:]
    encoded = [pipe.image_model.encode(request.prompt) for request in requests]
    width = max(len(ids) for ids in encoded if ids) if isinstance(encoded[0], list) else 0
    made: dict[Any, RequestOutput] = {}
    stats = pipe.serve(
        requests[:1],
        pipe.image_model.params,
        policy=Jacobi(40),
        rows=3,
        prompt_width=width,
        deliver=lambda served: made.update({served.request.tag: served}),
        arrivals=lambda most: [waiting.pop(0)] if waiting else [],
    )
    check(made)
    return stats


def test_images_are_rendered_one_at_a_time(
    pipe: TextToImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its own tokens, prompt and seed, as in a call with that seed."""
    own, steps = pipe.image_model.render, []

    def render(tokens: Tensor, texts: Sequence[str], seeds: Sequence[int]) -> Any:
        steps.append((tokens.tolist(), list(texts), list(seeds)))
        return own(tokens, texts, seeds)

    monkeypatch.setattr(pipe.image_model, "render", render)
    requests = [
        Request(CAPTIONS[k % 3], seed) for k, seed in enumerate((7, 2**63 + 1, 2**64 - 4, 7))
    ]
    pipe.serve(requests, pipe.image_model.params, rows=3, deliver=lambda served: None)
    served, steps[:] = [*steps], []
    for request in requests:
        pipe(request.prompt, seed=[request.seed])
    assert len(steps) == 4 and sorted(served) == sorted(steps)


def test_a_seat_is_not_written_into_what_was_offered(built: Opener) -> None:
    pipe: Any = TextToImage.from_pretrained(built("janus"))
    window, given = pipe.model, torch.tensor([5, 6, 7])
    window._lengths = given
    row_inputs = window.get_row_inputs()
    for rows, wanted in (([2, 0, 1], [7, 5, 6]), ([1, 1, 0], [6, 6, 5]), ([2], [7])):
        window.select_rows(row_inputs, torch.tensor(rows))
        assert window._lengths.tolist() == wanted and given.tolist() == [5, 6, 7]
    window.select_rows(row_inputs, None)
    assert window._lengths is given


def test_an_exception_from_deliver_ends_the_run(pipe: TextToImage) -> None:
    made: list[RequestOutput] = []

    def deliver(served: RequestOutput) -> None:
        made.append(served)
        if len(made) == 3:
            raise KeyError("full")

    with pytest.raises(KeyError, match="full"):
        pipe.serve(requests_of(CAPTIONS, 7), SamplingParams(2.0), rows=2, deliver=deliver)
    assert len(made) == 3
    assert_alone(pipe, serve(pipe, requests_of(CAPTIONS, 3)))  # the model is free


def test_nan_names_its_requests(tmp_path: Path) -> None:
    broken = TextToImage.from_pretrained(break_weights(build_tiny(tmp_path / "broken")))
    with pytest.raises(NumericsError) as caught:
        broken.serve(requests_of(CAPTIONS, 5), SamplingParams(2.0), rows=2, deliver=print)
    assert caught.value.rows == (0, 1)


@pytest.mark.slow
def test_a_canvas_admits_requests_during_a_run(tmp_path: Path) -> None:
    pipe = TextToImage.from_pretrained(masked_beside_plain(tmp_path)[0])
    stepwise, steps = mmaccel.Stepwise("halton"), []
    options = {"policy": stepwise, "on_step": lambda step: steps.append(step.rows)}
    assert_alone(pipe, serve(pipe, requests_of(CAPTIONS, 5), **options), policy=stepwise)
    assert steps[0] == (0, 1) and steps[-1][0] == 4 and {len(rows) for rows in steps} == {2}
