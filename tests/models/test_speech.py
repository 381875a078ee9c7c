"""Llasa and Orpheus from their files: prompts, voices, codecs, and checkpoints that are refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import TextToSpeech
from mmaccel.errors import MissingBackendError, OptionError, UnsupportedModelError
from mmaccel.pipelines.models import speech_tokens as speech_parts
from tests.fixtures.speech import FAMILIES, FIRST, SECONDS, SNAC_CODES, TEXTS

SEEDS = [3, 4, 5]
PROMPTS = {
    # start, two unknown words for the role; "Convert the text to speech:"
    "llasa": [4, 2, 2, 44, 2, 2, 2, 2, 5, 40, 41, 42, 6, 3, 4, 2, 7],
    "orpheus": [17, 2, 2, 52, 53, 54, 3, 18, 19, 15],
}
_LLAMA = (  # Llama's template for the date, with words of the fixture instead of dates
    "{% if not date_string is defined %}{% set date_string = strftime_now('%A') %}{% endif %}"
    "{{ 'red' if date_string == '26 Jul 2024' else 'blue' }} "
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def pipe(family: str, speech_folders: dict[str, tuple[Path, Path]]) -> TextToSpeech:
    model, codec = speech_folders[family]
    return TextToSpeech.from_pretrained(model, codec=codec)


def test_prompts_are_the_authors(pipe: TextToSpeech, family: str) -> None:
    assert pipe.speech.encode(" a red fox ", None) == PROMPTS[family]
    if family == "orpheus":
        assert pipe.speech.encode("a red fox", "snow") == [17, 57, *PROMPTS[family][2:]]


def test_the_prompt_does_not_change_with_the_day(
    speech_folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    folder = shutil.copytree(speech_folders["llasa"][0], tmp_path / "llasa")
    file = folder / "chat_template.jinja"
    file.write_text(_LLAMA + file.read_text(encoding="utf-8"), encoding="utf-8")
    source, codec = speech_folders["llasa"]
    speech: Any = TextToSpeech.from_pretrained(folder, codec=codec).speech
    plain = TextToSpeech.from_pretrained(source, codec=codec).speech
    (red,) = speech.tokenizer("red")["input_ids"]
    assert speech.encode("the fox", None) == [red, *plain.encode("the fox", None)]


def test_voices(pipe: TextToSpeech, family: str) -> None:
    with pytest.raises(OptionError, match="voice: expected"):
        pipe("a red fox", voice="tara: or <|eot_id|>", max_seconds=SECONDS[family])
    if family == "llasa":
        with pytest.raises(OptionError, match="voice: expected none for Llasa"):
            pipe("a red fox", voice="tara")
        assert pipe.speech.voices == ()
    else:
        assert pipe.speech.voices[0] == "tara"
        options: dict[str, Any] = dict(seed=[3], max_seconds=SECONDS[family])
        usual, named = pipe("a red fox", **options), pipe("a red fox", voice="snow", **options)
        assert usual[0].voice is None and named[0].voice == "snow"
        assert usual[0].tokens.tolist() != named[0].tokens.tolist()


def test_a_voice_is_a_name(speech_folders: dict[str, tuple[Path, Path]]) -> None:
    model, codec = speech_folders["orpheus"]
    pipe = TextToSpeech.from_pretrained(model, codec=codec)
    voices: list[Any] = ["", " ", "a:b", "<tara", "tara\x1b[31m", "a\nb", "\ud800", 3]
    for voice in voices:
        with pytest.raises(OptionError, match="voice: expected a name such as tara, leah"):
            pipe("a fox", voice=voice)


def test_llasas_sound_is_the_codecs(speech_folders: dict[str, tuple[Path, Path]]) -> None:
    from transformers import Xcodec2Model

    model, codec = speech_folders["llasa"]
    whole = Xcodec2Model.from_pretrained(codec).eval()
    (made,) = TextToSpeech.from_pretrained(model, codec=codec)(
        TEXTS[0], seed=3, max_seconds=SECONDS["llasa"]
    ).utterances
    codes = made.tokens - FIRST
    with torch.no_grad():
        sound = whole.decode(codes[None, None]).audio_values[0, 0]
    assert torch.equal(made.waveform, sound.clamp(-1, 1)) and made.sample_rate == 16000
    assert len(sound) == 20 * len(codes)


def test_orpheus_sound_is_the_codecs_and_its_noise_is_the_seeds(
    speech_folders: dict[str, tuple[Path, Path]],
) -> None:
    from snac import SNAC

    model, codec = speech_folders["orpheus"]
    pipe = TextToSpeech.from_pretrained(model, codec=codec)
    before = torch.get_rng_state()
    made = pipe(TEXTS, seed=SEEDS, max_seconds=SECONDS["orpheus"])
    assert torch.equal(torch.get_rng_state(), before)
    whole, utterance = SNAC.from_pretrained(str(codec)), made[2]
    coarse, middle, fine = [], [], []
    ids = utterance.tokens.tolist()
    for k in range(0, len(ids), 7):
        own = [ids[k + s] - FIRST - s * SNAC_CODES for s in range(7)]
        coarse.append(own[0])
        middle += [own[1], own[4]]
        fine += [own[2], own[3], own[5], own[6]]
    torch.manual_seed(SEEDS[2])
    with torch.no_grad():
        sound = whole.decode([torch.tensor([codes]) for codes in (coarse, middle, fine)])
    assert torch.equal(utterance.waveform, sound.flatten().clamp(-1, 1))
    assert utterance.sample_rate == 24000 and len(sound.flatten()) == 32 * len(coarse)
    other = pipe.speech.render(utterance.tokens, 9)
    assert not torch.equal(other, utterance.waveform)


def test_orpheus_draws_on_its_own_device_alone(
    speech_folders: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.manual_seed` would start the generators of all graphics cards anew."""
    seeded: list[object] = []
    for name in ("manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, seeded.append)
    model, codec = speech_folders["orpheus"]
    pipe = TextToSpeech.from_pretrained(model, codec=codec)
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


def test_the_codec_keeps_its_precision_and_its_bounds(
    speech_folders: dict[str, tuple[Path, Path]], family: str
) -> None:
    model, codec = speech_folders[family]
    speech: Any = TextToSpeech.from_pretrained(model, codec=codec, dtype=torch.bfloat16).speech
    assert speech.window.model.dtype == torch.bfloat16
    assert {value.dtype for value in speech.codec.parameters()} == {torch.float32}
    plain = speech.codec.decode

    def louder(codes: Any) -> Any:
        made = plain(codes)
        (made if family == "orpheus" else made.audio_values)[...] = 1.5
        return made

    speech.codec.decode = louder
    tokens = torch.arange(24, 52, 4) if family == "orpheus" else torch.arange(24, 31)
    sound = speech.render(tokens, 0)
    assert sound.dtype == torch.float32 and sound.unique().tolist() == [1.0]


def test_the_codecs_encoders_are_removed(speech_folders: dict[str, tuple[Path, Path]]) -> None:
    model, codec = speech_folders["llasa"]
    speech: Any = TextToSpeech.from_pretrained(model, codec=codec).speech
    names = {name.split(".")[0] for name, _ in speech.codec.named_parameters()}
    assert names == {"acoustic_decoder", "quantizer"} or names == {"acoustic_decoder"}


def test_a_model_is_self_checked_when_it_is_loaded(
    speech_folders: dict[str, tuple[Path, Path]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, codec = speech_folders[family]
    checked: list[tuple[Any, Any]] = []
    monkeypatch.setattr(speech_parts, "check_windows", lambda *both: checked.append(both))
    speech: Any = TextToSpeech.from_pretrained(model, codec=codec).speech
    assert checked == [(speech.window.model, speech.window)]


def test_a_checkpoint_of_another_family_is_refused(
    speech_folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    llasa, orpheus = speech_folders["llasa"], speech_folders["orpheus"]
    with pytest.raises(OptionError, match="family: expected one of llasa, orpheus"):
        TextToSpeech.from_pretrained(llasa[0], codec=llasa[1], family="bark")
    with pytest.raises(UnsupportedModelError, match="expected a tokenizer that knows <custom_tok"):
        TextToSpeech.from_pretrained(llasa[0], codec=orpheus[1], family="orpheus")
    with pytest.raises(UnsupportedModelError, match="codec: expected .* pytorch_model.bin"):
        TextToSpeech.from_pretrained(llasa[0], codec=orpheus[1])
    with pytest.raises(UnsupportedModelError, match="codec: expected a file config.json in"):
        TextToSpeech.from_pretrained(orpheus[0], codec=tmp_path)


def test_a_tokenizer_without_a_familys_codes_names_what_was_looked_for(
    speech_folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    from tests.fixtures.checkpoints import make_tokenizer

    make_tokenizer({"<pad>": 0, "<unk>": 1}, 2, 30).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"with <\|s_0\|> or <custom_token_10>"):
        TextToSpeech.from_pretrained(tmp_path, codec=speech_folders["llasa"][1])


def test_a_codec_of_other_codes_is_refused(
    speech_folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """Fewer tokens than the codec has codes, and strides of four levels."""
    from transformers import Xcodec2Config, Xcodec2Model

    config = Xcodec2Config.from_pretrained(speech_folders["llasa"][1])
    config.quantization_levels = [2, 2, 2, 4]
    Xcodec2Model(config).save_pretrained(tmp_path / "wide")
    with pytest.raises(UnsupportedModelError, match=r"a tokenizer that knows <\|s_16\|>"):
        TextToSpeech.from_pretrained(speech_folders["llasa"][0], codec=tmp_path / "wide")
    from snac import SNAC

    shutil.copytree(speech_folders["orpheus"][1], tmp_path / "snac")
    file = tmp_path / "snac" / "config.json"
    shape = json.loads(file.read_text(encoding="utf-8")) | {"vq_strides": [8, 4, 2, 1]}
    file.write_text(json.dumps(shape), encoding="utf-8")
    torch.save(SNAC(**shape).state_dict(), tmp_path / "snac" / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"three levels, strides \[4, 2, 1\]"):
        TextToSpeech.from_pretrained(speech_folders["orpheus"][0], codec=tmp_path / "snac")


def test_without_the_codecs_package_it_says_what_to_install(
    speech_folders: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "snac", None)
    model, codec = speech_folders["orpheus"]
    with pytest.raises(MissingBackendError, match="pip install snac"):
        TextToSpeech.from_pretrained(model, codec=codec)


def _template(text: str | None) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink()
        if text is not None:
            (folder / "chat_template.jinja").write_text(text, encoding="utf-8")

    return spoil


def _split_marker(folder: Path) -> None:
    """Keep the token in the vocabulary, but not among the added tokens."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    added = content["added_tokens"]
    content["added_tokens"] = [t for t in added if t["content"] != "<|SPEECH_GENERATION_START|>"]
    assert len(content["added_tokens"]) == len(added) - 1
    file.write_text(json.dumps(content), encoding="utf-8")


def _swap_codes(folder: Path) -> None:
    """Swap two codes; the first and the last stay."""
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    for old, new in (("<|s_3|>", "<|s_x|>"), ("<|s_5|>", "<|s_3|>"), ("<|s_x|>", "<|s_5|>")):
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")


_ENDS_EARLY = "{% for m in messages %}{{ m.content[:5] }}{% endfor %}"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        *((_template(text), "chat template: expected one that renders a prompt") for text in (
            None, "", "{% for", "{{ raise_exception('no') }}", "hello", _ENDS_EARLY)),
        (_split_marker, "received a prompt that ends otherwise"),
        (_swap_codes, "received 24 and, 3 later, 29; give"),
    ],
)  # fmt: skip
def test_a_spoilt_tokenizer_is_refused(
    speech_folders: dict[str, tuple[Path, Path]], tmp_path: Path,
    spoil: Callable[[Path], object], message: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Before the model is used; the self-check is not needed for it."""
    monkeypatch.setattr(speech_parts, "check_windows", lambda *_: None)
    source, codec = speech_folders["llasa"]
    folder = shutil.copytree(source, tmp_path / "llasa")
    spoil(folder)
    with pytest.raises(UnsupportedModelError, match=message):
        TextToSpeech.from_pretrained(folder, codec=codec)
