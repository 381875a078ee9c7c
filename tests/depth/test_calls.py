"""Calls of depth decoders: what is refused, what falls back, what threads and layouts do."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel.errors import AttachError, OptionError, UnsupportedModelError
from tests.depth.models import CODES, Speech, make_csm, make_moshi
from tests.fixtures.tiny_lms import falls_back


def refusal(speech: Speech, **options: Any) -> str:
    """Why strict refuses a call; empty where it is served."""
    frame = {k: v for k, v in (speech.frame(2) | options).items() if v is not None}
    with mmaccel.attach(speech.decoder, "jacobi", strict=True):
        try:
            speech.decoder.generate(**frame, do_sample=False)
        except AttachError as error:
            return str(error)
    return ""


def test_what_a_frame_cannot_have(speech: Speech) -> None:
    assert refusal(speech) == ""
    if speech.decoder.config.model_type != "moshi_depth":  # whose frame begins with one entry
        hides = torch.tensor([[0, 1], [1, 1]])
        assert "mask" in refusal(speech, attention_mask=hides)
    longer = refusal(speech, min_new_tokens=0, max_new_tokens=speech.depth + 1)
    assert "more positions" in longer
    for asked in ["output_attentions", "output_hidden_states"]:
        said = refusal(speech, **{asked: True, "return_dict_in_generate": True})
        is_read = asked == "output_hidden_states" and "inputs_embeds" in speech.frame(1)
        assert (asked in said) is not is_read
    for given in {"backbone_last_hidden_state", "last_hidden_state"} & speech.frame(1).keys():
        assert f"no {given}" in refusal(speech, **{given: None})


def test_layers_are_fused_where_books_share_them(speech: Speech) -> None:
    with mmaccel.attach(speech.decoder, "jacobi", strict=True) as handle:
        made = speech.decoder.generate(**speech.frame(2), do_sample=False)
    assert handle.stats is not None
    is_moshi = speech.decoder.config.model_type == "moshi_depth"
    assert handle.stats.route == ("model" if is_moshi else "fused")
    with mmaccel.attach(speech.decoder, "jacobi", fused=False, strict=True) as handle:
        own = speech.decoder.generate(**speech.frame(2), do_sample=False)
    assert handle.stats is not None and handle.stats.route == "model"
    assert torch.equal(getattr(made, "sequences", made), getattr(own, "sequences", own))
    if is_moshi:
        with pytest.raises(UnsupportedModelError, match="fused=True"):
            mmaccel.attach(speech.decoder, "jacobi", fused=True)


def test_a_layout_masks_codes(csm: Speech) -> None:
    low = mmaccel.Frames(((0, 8),) * csm.depth, 32)
    for policy in (mmaccel.Jacobi(window=8), mmaccel.Jacobi(window=8, drafts="previous-frame")):
        with mmaccel.attach(csm.decoder, policy, layout=low, seed=0, strict=True) as handle:
            made = [csm.decoder.generate(**csm.frame(2), do_sample=False) for _ in range(2)]
        assert all(int(codes[:, 2:].max()) < 8 for codes in made)
    assert handle.history[1].passes == 1


def test_a_layout_of_another_vocabulary_is_refused(speech: Speech) -> None:
    layout = mmaccel.Frames(((0, 8),), CODES + 1)
    with pytest.raises(OptionError, match=f"expected the model's {CODES} ids, .* of {CODES + 1};"):
        mmaccel.attach(speech.model, "jacobi", layout=layout)


def test_weights_that_are_replaced_between_two_frames_are_read() -> None:
    speech = make_csm()  # whose weights the fused decoder packs
    weights = {name: value.clone() for name, value in speech.decoder.state_dict().items()}
    steps: list[int] = []

    def halve(*_: Any) -> None:
        steps.append(1)
        if len(steps) == 3:
            for weight in speech.decoder.parameters():
                weight.data = weight.data / 2

    speech.model.register_forward_pre_hook(halve)
    plain = speech.call(False)
    speech.decoder.load_state_dict(weights)
    steps.clear()
    with mmaccel.attach(speech.model, "jacobi", strict=True) as handle:
        assert torch.equal(speech.call(False), plain)
    assert handle.stats is not None and handle.stats.route == "fused" and len(steps) > 3


def test_frames_that_fall_back_have_noise_of_their_own(csm: Speech) -> None:
    class Counts:
        """Not marked as stateless."""

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            return scores

    frame = csm.frame(2) | {"logits_processor": [Counts()]}
    with mmaccel.attach(csm.decoder, "jacobi", seed=3) as handle:
        with pytest.warns(UserWarning, match="Counts"):
            made = [csm.decoder.generate(**frame, do_sample=True) for _ in range(2)]
    assert all(stats.fallbacks for stats in handle.history)
    assert not torch.equal(*made)


def test_threads_have_frames_of_their_own(csm: Speech) -> None:
    def speak() -> list[Tensor]:
        frame = csm.frame(2)
        return [csm.decoder.generate(**frame, do_sample=True) for _ in range(3)]

    with mmaccel.attach(csm.decoder, "jacobi", seed=7) as handle:
        alone = speak()
        handle.reset()  # begins the series anew
        assert all(torch.equal(*pair) for pair in zip(alone, speak(), strict=True))
    assert not torch.equal(alone[0], alone[1])
    found: dict[int, list[Tensor]] = {}
    with mmaccel.attach(csm.decoder, "jacobi", seed=7):
        threads = [
            threading.Thread(target=lambda n=n: found.update({n: speak()})) for n in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for made in found.values():
        assert all(torch.equal(*pair) for pair in zip(alone, made, strict=True))


def test_a_call_without_frames_is_recorded(csm: Speech, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(csm.model), "generate", lambda self, **_: None)
    with falls_back(csm.model, "never called its decoder"):
        csm.model.generate(input_ids=torch.tensor([[1]]))


def test_a_decoder_whose_steps_see_less_than_a_pass_is_refused() -> None:
    moshi = make_moshi(window=3)
    found = mmaccel.supports(moshi.model)
    assert not found and "sliding window" in found.reason
