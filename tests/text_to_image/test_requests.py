"""Requests: every image is the one its caption and seed make, whoever else was in the making."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import (
    ContinuousBatching,
    Jacobi,
    Noise,
    Request,
    RequestOutput,
    SamplingParams,
    SpeculativeJacobi,
    TextToImage,
)  # fmt: skip
from mmaccel.errors import BusyError, NumericsError, OptionError
from mmaccel.pipelines.runner.engine import Engine
from tests.fixtures.checkpoints import FAMILIES, SIZES, captions
from tests.fixtures.graph_replay import Replay
from tests.fixtures.tiny_model import CAPTIONS, break_weights, build_tiny, masked_beside_plain

Opener = Callable[[str], Path]


@pytest.fixture(scope="module")
def pipe(tiny_folder: Path) -> TextToImage:
    return TextToImage.from_pretrained(tiny_folder)


def requests_of(texts: list[str], n: int) -> list[Request]:
    return [Request(texts[k % len(texts)], 40 + k, tag=("job", k)) for k in range(n)]


def serve(pipe: TextToImage, requests: list[Request], **options: Any) -> dict[Any, RequestOutput]:
    """What was delivered, by tag."""
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
        own = pipe(served.request.caption, seed=[served.request.seed], **options)
        assert served.tokens.equal(own.tokens[0]) and served.tokens.device.type == "cpu"
        assert served.image.tobytes() == own.images[0].tobytes()
        assert served.passes == int(own.passes[0])


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 20])
def test_neither_places_nor_order_enter_an_image(pipe: TextToImage, rows: int) -> None:
    requests = requests_of(CAPTIONS, 7)
    made = serve(pipe, requests, rows=rows, policy=Jacobi(5))
    assert_alone(pipe, made, policy=Jacobi(5))
    turned = serve(pipe, requests[::-1], rows=rows, policy=Jacobi(5))
    for tag, served in made.items():
        assert turned[tag].image.tobytes() == served.image.tobytes()
    assert len({served.image.tobytes() for served in made.values()}) == 7


def test_policies_that_promise_a_law_keep_it_by_row(pipe: TextToImage) -> None:
    """On a tiny model no acceptance hangs on a last bit."""
    policy = mmaccel.GroupedSpeculative(window=5, group=3)
    made = serve(pipe, requests_of(CAPTIONS, 5), policy=policy)
    assert_alone(pipe, made, policy=policy)
    for served in made.values():
        own = pipe(served.request.caption, seed=[served.request.seed], policy=policy)
        assert served.total_variation == pytest.approx(own.stats.total_variation, abs=1e-4)
        assert served.total_variation > 0 == served.nats
    exact = serve(pipe, requests_of(CAPTIONS, 5), policy=SpeculativeJacobi(5))
    assert {served.total_variation for served in exact.values()} == {0.0}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_newcomers(
    built: Opener, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a window is given for each row goes with the row; so it does where passes are recorded.

    Tokens alone are compared.
    """
    pipe = TextToImage.from_pretrained(built(family), size=SIZES.get(family))
    pipe.image_model.render = lambda tokens, *_: [None]  # type: ignore[method-assign, assignment, list-item, misc]
    requests = requests_of(captions(family), 5)
    for window, recorded in ((40, False), (8, True), (8, True)):  # the last takes what was left
        policy = Jacobi(window)
        alone = [pipe(each.caption, seed=[each.seed], policy=policy).tokens for each in requests]
        with monkeypatch.context() as patch:
            if recorded:
                patch.setattr(
                    Engine, "runner", lambda self, *_: Replay(self.sync_every, self.cache)
                )
            made = serve(pipe, requests, policy=policy)
        assert all(made[each.tag].tokens.equal(own[0]) for each, own in zip(requests, alone))
        assert len({tuple(served.tokens.tolist()) for served in made.values()}) == 5
    assert len(pipe.engine.cache) == 1


def test_images_are_rendered_one_at_a_time(
    pipe: TextToImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their own tokens, caption and seed, as a call with that seed gives it."""
    own, told = pipe.image_model.render, []

    def render(tokens: Tensor, texts: Sequence[str], seeds: Sequence[int]) -> Any:
        told.append((tokens.tolist(), list(texts), list(seeds)))
        return own(tokens, texts, seeds)

    monkeypatch.setattr(pipe.image_model, "render", render)
    requests = [Request(CAPTIONS[k % 3], seed) for k, seed in enumerate((7, 2**63 + 1, -4, 7))]
    pipe.serve(requests, pipe.image_model.params, rows=3, deliver=lambda served: None)
    served, told[:] = [*told], []
    for request in requests:
        pipe(request.caption, seed=[request.seed])
    assert len(told) == 4 and sorted(served) == sorted(told)


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


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_what_a_window_was_given_is_given_back(built: Opener, rows: int) -> None:
    """One prompt for two runs, neither of which writes into it."""
    pipe: Any = TextToImage.from_pretrained(built("janus"))
    prompt = pipe.image_model.prompt(
        [pipe.image_model.encode(text) for text in captions("janus")], True
    )
    before = prompt.tokens.clone(), prompt.lengths.clone()
    assert len(set(before[1].tolist())) > 1
    made = []
    for places in (ContinuousBatching(rows), ContinuousBatching(rows), None):
        assert pipe.model._lengths is prompt.lengths
        own = replace(prompt, batching=places)
        noise = Noise.from_seed([4, 5, 6], 3)
        run = Jacobi(7).sample(pipe.model, own, 16, params=SamplingParams(2.0), noise=noise)
        made.append(run.tokens)
        assert noise.seeds.tolist() == [4, 5, 6]
    assert made[0].equal(made[2]) and made[1].equal(made[2])
    assert prompt.tokens.equal(before[0]) and prompt.lengths.equal(before[1])


def test_scenes_are_the_same_to_the_pixel() -> None:
    """The embedded model, its own guidance, in float32."""
    pipe = TextToImage.from_pretrained("scenes")
    captions = ["a red circle", "a blue star on snow", "a green ring above a yellow square"]
    requests = [Request(text, 3 + k, k) for k, text in enumerate(captions)]
    assert_alone(pipe, serve(pipe, requests))


def test_places_save_passes_and_positions(pipe: TextToImage) -> None:
    """Every place is taken until nobody is left: passes by hand from those of the rows."""
    requests, passes = requests_of(CAPTIONS, 7), []
    stats = pipe.serve(
        requests, pipe.image_model.params, policy=Jacobi(5), rows=3,
        deliver=lambda served: passes.append((served.request.tag[1], served.passes)),
    )  # fmt: skip
    own = dict(passes)
    ends = [own[0], own[1], own[2]]
    for k in range(3, 7):  # the first place that becomes free
        place = ends.index(min(ends))
        ends[place] += own[k]
    assert stats.passes == max(ends)
    texts = [request.caption for request in requests]
    batches = pipe(texts, policy=Jacobi(5), seed=[r.seed for r in requests], batch_size=3)
    assert (
        stats.passes < batches.stats.passes
        and stats.tokens_processed < batches.stats.tokens_processed
    )


def test_everything_is_checked_before_the_first_pass(pipe: TextToImage) -> None:
    params, good = pipe.image_model.params, Request(CAPTIONS[0], 1)
    told: list[Any] = []

    def refused(requests: Any, match: str, **options: Any) -> None:
        with pytest.raises(OptionError, match=match):
            pipe.serve(requests, **{"params": params, "deliver": told.append, **options})

    refused([good, Request("a purple dragon", 1)], "dragon")
    refused([], "requests: expected a list")
    refused([good, CAPTIONS[0]], "requests: expected a list")
    refused(good, "requests: expected a list")
    refused([Request(CAPTIONS[0], [1, 2])], "seed: expected one integer")  # type: ignore[arg-type]
    refused([Request(CAPTIONS[0], 2**64)], "seed: expected a 64-bit")
    refused([good], "rows: expected an integer of at least 1", rows=0)
    refused([good], "deliver: expected a function", deliver=None)
    refused([good], "params: expected", params=None)
    refused([good], "policy: expected", policy=mmaccel.Stepwise())
    assert told == []


def test_what_a_receiver_raises_ends_the_run(pipe: TextToImage) -> None:
    made: list[RequestOutput] = []

    def deliver(served: RequestOutput) -> None:
        made.append(served)
        if len(made) == 3:
            raise KeyError("full")

    with pytest.raises(KeyError, match="full"):
        pipe.serve(requests_of(CAPTIONS, 7), SamplingParams(2.0), rows=2, deliver=deliver)
    assert len(made) == 3
    assert_alone(pipe, serve(pipe, requests_of(CAPTIONS, 3)))  # nothing is held


def test_a_receiver_cannot_ask_the_same_model(pipe: TextToImage) -> None:
    def deliver(_: RequestOutput) -> None:
        pipe(CAPTIONS[0])

    with pytest.raises(BusyError):
        pipe.serve(requests_of(CAPTIONS, 2), SamplingParams(2.0), deliver=deliver)


def test_a_broken_model_says_for_whom(tmp_path: Path) -> None:
    broken = TextToImage.from_pretrained(break_weights(build_tiny(tmp_path / "broken")))
    with pytest.raises(NumericsError) as caught:
        broken.serve(requests_of(CAPTIONS, 5), SamplingParams(2.0), rows=2, deliver=print)
    assert caught.value.rows == (0, 1)


def test_a_canvas_takes_the_next_request_too(tmp_path: Path) -> None:
    masked, _ = masked_beside_plain(tmp_path)
    pipe = TextToImage.from_pretrained(masked)
    requests, told = requests_of(CAPTIONS, 5), []
    stepwise = mmaccel.Stepwise("halton")
    made = serve(pipe, requests, policy=stepwise, on_step=lambda step: told.append(step.rows))
    assert_alone(pipe, made, policy=stepwise)
    for one in serve(pipe, requests).values():  # lossless: other passes, the same image
        own = pipe(one.request.caption, seed=[one.request.seed])
        assert one.image.tobytes() == own.images[0].tobytes()
    assert {served.nats for served in made.values()} == {0.0}
    assert told[0] == (0, 1) and told[-1][0] == 4 and {len(rows) for rows in told} == {2}
    told.clear()
    relaxed = mmaccel.ConfidentParallel(0.3)
    served = serve(pipe, requests, policy=relaxed, on_step=lambda step: told.append(step.rows))
    for one in served.values():
        own = pipe(one.request.caption, seed=[one.request.seed], policy=relaxed)
        assert one.nats == pytest.approx(own.stats.nats, abs=1e-4) and one.nats > 0
        assert one.total_variation == 0.0 and one.passes == int(own.passes[0])
    lengths = [one.passes for one in served.values()]
    assert len(set(lengths)) > 1 and (0, 1) != (2, 3) not in told[: min(lengths) + 1]
