"""Text to speech: checkpoints and texts that nobody should give, and lengths at the edge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import TextToSpeech
from mmaccel.errors import NumericsError, OptionError, UnsupportedModelError
from mmaccel.pipelines.checkpoint import check_caption
from mmaccel.pipelines.speech_plan import count_slots
from tests.speech_beds import FAMILIES, FIRST, LLASA_CODES, SECONDS

_LLAMA = (  # what Llama's template does about the day, with words of the bed's for dates
    "{% if not date_string is defined %}{% set date_string = strftime_now('%A') %}{% endif %}"
    "{{ 'red' if date_string == '26 Jul 2024' else 'blue' }} "
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def pipe(family: str, speech_folders: dict[str, tuple[Path, Path]]) -> TextToSpeech:
    model, codec = speech_folders[family]
    return TextToSpeech.from_pretrained(model, codec=codec)


@pytest.mark.parametrize("text", ["a \ud800 fox", "fox \udcff"])
def test_half_a_character_is_refused_with_its_place(pipe: TextToSpeech, text: str) -> None:
    with pytest.raises(OptionError, match=r"received '\\ud[8c][0f][0f]' at place [24]; write it"):
        pipe(["a fox", text])


def test_control_tokens_are_looked_for_only_where_there_may_be_one() -> None:
    class Counted:
        asked = 0

        def get_added_vocab(self) -> dict[str, int]:
            self.asked += 1
            return {"<|end|>": 1}

    tokenizer = Counted()
    for text in ("a fox", "a > b", "a < b"):
        assert check_caption(text, tokenizer) == text
    assert tokenizer.asked == 0  # tens of thousands of codes are slow to go through
    assert check_caption("<b>a</b>", tokenizer) == "<b>a</b>"
    with pytest.raises(OptionError, match=r"received <\|end\|>"):
        check_caption("a <|end|> b", tokenizer)


def test_a_voice_is_a_name(speech_folders: dict[str, tuple[Path, Path]]) -> None:
    pipe = TextToSpeech.from_pretrained(
        speech_folders["orpheus"][0], codec=speech_folders["orpheus"][1]
    )
    voices: list[Any] = ["", " ", "a:b", "<tara", "tara\x1b[31m", "a\nb", "\ud800", 3]
    for voice in voices:
        with pytest.raises(OptionError, match="voice: expected a name such as tara, leah"):
            pipe("a fox", voice=voice)


def test_sound_that_is_no_number_names_its_text(pipe: TextToSpeech, family: str) -> None:
    speech: Any = pipe.speech
    codec = speech.codec
    plain, kept = codec.decode, []

    def decode(codes: Any) -> Any:
        made = plain(codes)
        kept.append(made)
        if len(kept) == 2:
            (made if family == "orpheus" else made.audio_values)[..., -1] = float("nan")
        return made

    codec.decode = decode
    delivered: list[int] = []
    with pytest.raises(NumericsError, match="waveform: expected samples in -1..1") as error:
        pipe(
            ["fox"] * 3, seed=[3, 4, 5], max_seconds=SECONDS[family], batch_size=1,
            deliver=lambda made: delivered.append(made.index), temperature=9.0,
        )  # fmt: skip
    assert error.value.rows == (1,) and delivered == [0]


def test_nan_of_the_model_names_its_text(pipe: TextToSpeech, family: str) -> None:
    speech: Any = pipe.speech
    window = speech.window
    words = window.model.get_input_embeddings()
    odd = speech.tokenizer("cat")["input_ids"][-1]
    with torch.no_grad():
        words.weight[odd] = float("nan")
    for rows, named in ((1, (1,)), (2, (1,)), (None, (1, 3))):
        with pytest.raises(NumericsError) as error:
            pipe(["fox", "cat", "fox", "cat"], max_seconds=SECONDS[family], batch_size=rows)
        assert error.value.rows == named


def test_ids_that_the_model_does_not_have_are_refused_before_any_pass(
    speech_folders: dict[str, tuple[Path, Path]], family: str, tmp_path: Path
) -> None:
    """Codes are within the embeddings, words are not."""
    from transformers import AutoModelForCausalLM

    source, codec = speech_folders[family]
    size = {"llasa": FIRST + LLASA_CODES + 5, "orpheus": FIRST + 28}[family]  # Llasa: its request
    folder = shutil.copytree(source, tmp_path / "small")
    model = AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(size)
    model.save_pretrained(folder)
    small = TextToSpeech.from_pretrained(folder, codec=codec)
    passes: list[object] = []
    window: Any = small.speech.window
    window.model.register_forward_pre_hook(lambda *_: passes.append(_))
    speech: Any = small.speech
    word = speech.tokenizer.convert_ids_to_tokens(size)  # the first that is missing
    with pytest.raises(UnsupportedModelError, match=f"{size} ids, received a text with id {size};"):
        small(word, max_seconds=SECONDS[family])
    assert passes == []


@pytest.mark.parametrize(
    "template",
    [None, "", "{% for", "{{ raise_exception('no') }}", "hello",
     "{% for m in messages %}{{ m.content[:5] }}{% endfor %}"],
)  # fmt: skip
def test_a_template_that_does_not_go_on_is_refused_when_the_model_is_loaded(
    speech_folders: dict[str, tuple[Path, Path]], tmp_path: Path, template: str | None
) -> None:
    folder = shutil.copytree(speech_folders["llasa"][0], tmp_path / "llasa")
    file = folder / "chat_template.jinja"
    if template is None:
        file.unlink()
    else:
        file.write_text(template, encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="expected a tokenizer with a chat template"):
        TextToSpeech.from_pretrained(folder, codec=speech_folders["llasa"][1])


def test_a_mark_that_is_cut_into_pieces_is_refused(
    speech_folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """It is in the vocabulary, but the tokenizer does not know that it is one token."""
    folder = shutil.copytree(speech_folders["llasa"][0], tmp_path / "llasa")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    added = content["added_tokens"]
    content["added_tokens"] = [t for t in added if t["content"] != "<|SPEECH_GENERATION_START|>"]
    assert len(content["added_tokens"]) == len(added) - 1
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="received a prompt that ends otherwise"):
        TextToSpeech.from_pretrained(folder, codec=speech_folders["llasa"][1])


def test_the_prompt_does_not_change_with_the_day(
    speech_folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    folder = shutil.copytree(speech_folders["llasa"][0], tmp_path / "llasa")
    file = folder / "chat_template.jinja"
    file.write_text(_LLAMA + file.read_text(encoding="utf-8"), encoding="utf-8")
    speech: Any = TextToSpeech.from_pretrained(folder, codec=speech_folders["llasa"][1]).speech
    plain = TextToSpeech.from_pretrained(
        speech_folders["llasa"][0], codec=speech_folders["llasa"][1]
    ).speech
    (red,) = speech.tokenizer("red")["input_ids"]
    assert speech.encode("the fox", None) == [red, *plain.encode("the fox", None)]


def test_codes_out_of_order_are_refused(
    speech_folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """The first and the last are where they belong."""
    folder = shutil.copytree(speech_folders["llasa"][0], tmp_path / "llasa")
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    for old, new in (("<|s_3|>", "<|s_x|>"), ("<|s_5|>", "<|s_3|>"), ("<|s_x|>", "<|s_5|>")):
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="received 24 and, 3 behind it, 29; give"):
        TextToSpeech.from_pretrained(folder, codec=speech_folders["llasa"][1])


def test_orpheus_draws_on_its_own_device_alone(
    speech_folders: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.manual_seed` would start the generators of all graphics cards anew."""
    seeded: list[object] = []
    for name in ("manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, seeded.append)
    pipe = TextToSpeech.from_pretrained(
        speech_folders["orpheus"][0], codec=speech_folders["orpheus"][1]
    )
    before = torch.get_rng_state()
    tokens = torch.arange(FIRST, FIRST + 28, 4)
    first, again = pipe.speech.render(tokens, -1), pipe.speech.render(tokens, -1)
    other = pipe.speech.render(tokens, 2**64 - 2)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert seeded == [] and torch.equal(torch.get_rng_state(), before)


def test_two_codecs_in_two_threads_draw_what_each_draws_alone(
    speech_folders: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other between its seed and its noise, half a second at most."""
    model, codec = speech_folders["orpheus"]
    speeches: list[Any] = [TextToSpeech.from_pretrained(model, codec=codec).speech for _ in "ab"]
    tokens = torch.arange(FIRST, FIRST + 28, 4)
    alone = [speech.render(tokens, seed) for seed, speech in enumerate(speeches)]
    seeded, drawn = [Event(), Event()], [Event(), Event()]

    def hold(mine: int, decode: Callable[[Any], Tensor], other: Event) -> Callable[[Any], Tensor]:
        def wait(codes: Any) -> Tensor:
            seeded[mine].set()
            other.wait(0.5)
            sound = decode(codes)
            drawn[mine].set()
            return sound

        return wait

    for k, other in enumerate((seeded[1], drawn[0])):
        decoder = speeches[k].codec
        monkeypatch.setattr(decoder, "decode", hold(k, decoder.decode, other))
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(speeches[0].render, tokens, 0)
        assert seeded[0].wait(30)
        second = threads.submit(speeches[1].render, tokens, 1)
    assert torch.equal(first.result(), alone[0]) and torch.equal(second.result(), alone[1])


def _model(limit: int | None, columns: int, rate: int, frame: int) -> Any:
    return SimpleNamespace(
        layout=SimpleNamespace(columns=columns), window=SimpleNamespace(max_positions=limit),
        sample_rate=rate, frame_samples=frame,
    )  # fmt: skip


def test_lengths_by_hand() -> None:
    """50 codes a second; 24000 / 2048 frames of 7 codes; and one slot for the end."""
    llasa, orpheus = _model(None, 1, 16000, 320), _model(None, 7, 24000, 2048)
    for seconds, codes in ((0.28, 14), (0.29, 15), (0.02, 1), (1e-9, 1), (3600, 180000)):
        assert count_slots(llasa, 20, seconds) == codes + 1
    assert count_slots(llasa, 20, None) == 1501
    for seconds, frames in ((1, 12), (2048 / 24000, 1), (0.1, 2), (30, 352)):
        assert count_slots(orpheus, 20, seconds) == 7 * frames + 1
    assert count_slots(orpheus, 20, None) == 7 * 352 + 1


def test_the_length_that_is_proposed_is_taken() -> None:
    cases = [(_model(300, 1, 16000, 320), 102, "3.96"), (_model(160, 1, 16000, 20), 15, "0.181")]
    cases.append((_model(100, 7, 24000, 2048), 30, "0.853"))
    for model, prompt, seconds in cases:
        with pytest.raises(OptionError, match=f"or set max_seconds to at most {seconds}$"):
            count_slots(model, prompt, 20)
        room = (model.window.max_positions - prompt) // model.layout.columns
        assert count_slots(model, prompt, float(seconds)) <= room * model.layout.columns + 1
        assert count_slots(model, prompt, None) == room * model.layout.columns + 1
    for prompt, limit in ((100, 100), (200, 100), (94, 100)):
        for asked in (None, 1.0):
            with pytest.raises(OptionError, match="; shorten the text$"):
                count_slots(_model(limit, 7, 24000, 2048), prompt, asked)


def test_seeds_are_told_without_a_sign(pipe: TextToSpeech, family: str) -> None:
    options: dict[str, Any] = dict(max_seconds=SECONDS[family], temperature=9.0)
    for seed in (-1, 2**64 - 1):
        made = pipe(["fox", "fox"], seed=seed, **options)
        assert [each.seed for each in made.utterances] == [2**64 - 1, 0]
        alone = pipe("fox", seed=[made[0].seed], **options)
        assert torch.equal(alone[0].waveform, made[0].waveform) and len(alone[0].waveform)
