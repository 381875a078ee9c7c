"""Text to speech: transformers' own tokens, the codec's own sound, every bad input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmaccel
from mmaccel import Autoregressive, Jacobi, SpeculativeJacobi, TextToSpeech
from mmaccel.errors import MissingBackendError, OptionError, UnsupportedModelError
from mmaccel.pipelines.speech import Utterance
from tests.speech_beds import END, FAMILIES, FIRST, LLASA_CODES, SECONDS, SNAC_CODES, TEXTS

SEEDS = [3, 4, 5]
CODES = {"llasa": 40, "orpheus": 42}
PROMPTS = {
    # start, two words it does not know, which stand for the role; "Convert the text to speech:"
    "llasa": [4, 2, 2, 44, 2, 2, 2, 2, 5, 40, 41, 42, 6, 3, 4, 2, 7],
    "orpheus": [17, 2, 2, 52, 53, 54, 3, 18, 19, 15],
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def pipe(family: str, speech_folders: dict[str, tuple[Path, Path]]) -> TextToSpeech:
    model, codec = speech_folders[family]
    return TextToSpeech.from_pretrained(model, codec=codec)


def allowed(family: str, width: int) -> Callable[[int, Tensor], list[int]]:
    """What may follow, by hand: `generate`'s `prefix_allowed_tokens_fn`."""

    def ids(_: int, row: Tensor) -> list[int]:
        if family == "llasa":
            return [8, *range(FIRST, FIRST + LLASA_CODES)]
        slot = (len(row) - width) % 7
        low = FIRST + SNAC_CODES * slot
        return [*range(low, low + SNAC_CODES), *([16] if slot == 0 else [])]

    return ids


def generated(pipe: TextToSpeech, family: str, text: str, penalty: float) -> list[int]:
    """Greedy tokens of transformers' `generate`, the end token left out."""
    window: Any = pipe.speech.window
    ids = torch.tensor([pipe.speech.encode(text, None)])
    made = window.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, repetition_penalty=penalty,
        max_new_tokens=CODES[family], eos_token_id=END[family], pad_token_id=0,
        prefix_allowed_tokens_fn=allowed(family, ids.shape[1]),
    )[0, ids.shape[1] :].tolist()  # fmt: skip
    return made[:-1] if made[-1] == END[family] else made


def test_prompts_are_the_authors(pipe: TextToSpeech, family: str) -> None:
    assert pipe.speech.encode(" a red fox ", None) == PROMPTS[family]
    if family == "orpheus":
        assert pipe.speech.encode("a red fox", "snow") == [17, 57, *PROMPTS[family][2:]]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_tokens_are_those_of_transformers(
    pipe: TextToSpeech, family: str, penalty: float
) -> None:
    options: dict[str, Any] = dict(temperature=0.0, top_p=1.0, repetition_penalty=penalty)
    for policy in (Autoregressive(), Jacobi(window=6)):
        speech = pipe(TEXTS, policy=policy, max_seconds=SECONDS[family], **options)
        for text, made in zip(TEXTS, speech.utterances, strict=True):
            assert made.tokens.tolist() == generated(pipe, family, text, penalty)
    usual = pipe(TEXTS[0], temperature=0.0, max_seconds=SECONDS[family])
    assert usual[0].tokens.tolist() == generated(
        pipe, family, TEXTS[0], {"llasa": 1.0, "orpheus": 1.3}[family]
    )


def test_what_the_authors_recommend(pipe: TextToSpeech, family: str) -> None:
    """Llasa: temperature 0.8; Orpheus: 0.6, top-p 0.8, penalty 1.3. Given or not, the same."""
    own: dict[str, Any] = {
        "llasa": dict(temperature=0.8, top_k=50, top_p=1.0, repetition_penalty=1.0),
        "orpheus": dict(temperature=0.6, top_p=0.8, repetition_penalty=1.3),
    }[family]
    recommended = pipe.speech.filters
    assert recommended.top_k == {"llasa": 50, "orpheus": None}[family]
    options: dict[str, Any] = dict(seed=SEEDS, max_seconds=SECONDS[family])
    plain, said = pipe(TEXTS, **options), pipe(TEXTS, **options, **own)
    other = pipe(TEXTS, **options, **{**own, "temperature": 1.5})
    assert [u.tokens.tolist() for u in plain.utterances] == [
        u.tokens.tolist() for u in said.utterances
    ]
    assert [u.tokens.tolist() for u in plain.utterances] != [
        u.tokens.tolist() for u in other.utterances
    ]


def test_policy_and_batch_change_what_it_costs_alone(pipe: TextToSpeech, family: str) -> None:
    options: dict[str, Any] = dict(seed=SEEDS, max_seconds=SECONDS[family])
    plain = pipe(TEXTS, policy=Autoregressive(), **options)
    assert len({len(made.tokens) for made in plain.utterances}) > 1  # ragged
    for policy, rows in ((Jacobi(window=8), 1), (Jacobi(window=8), 2), (None, None)):
        delivered: list[Utterance] = []
        fast = pipe(TEXTS, policy=policy, batch_size=rows, deliver=delivered.append, **options)
        for k, (a, b) in enumerate(zip(plain.utterances, fast.utterances, strict=True)):
            assert torch.equal(a.tokens, b.tokens) and torch.equal(a.waveform, b.waveform)
            assert (b.index, b.text, b.seed) == (k, TEXTS[k], SEEDS[k])
            assert a.is_finished == b.is_finished
        assert sum(made.passes for made in fast.utterances) < plain.stats.row_passes
        assert sorted(made.index for made in delivered) == [0, 1, 2]
        assert fast.stats.exactness == "bitwise"
    alone = pipe(TEXTS[1], seed=[4], max_seconds=SECONDS[family])
    assert torch.equal(alone[0].tokens, plain[1].tokens)
    one_seed = pipe([TEXTS[1]] * 2, seed=4, max_seconds=SECONDS[family])
    assert [made.seed for made in one_seed.utterances] == [4, 5]
    other = pipe(TEXTS, policy=SpeculativeJacobi(window=8), **options)
    assert other.stats.exactness == "distribution"


def test_codes_stay_in_their_ranges_and_an_end_is_no_code(pipe: TextToSpeech, family: str) -> None:
    speech = pipe(TEXTS * 4, seed=list(range(12)), temperature=1.2, max_seconds=SECONDS[family])
    ends = [made.is_finished for made in speech.utterances]
    assert any(ends) and not all(ends)
    columns = pipe.speech.layout.columns
    for made in speech.utterances:
        assert len(made.tokens) % columns == 0 and len(made.tokens) <= CODES[family]
        if not made.is_finished:
            assert len(made.tokens) == CODES[family]
        may = allowed(family, 0)
        for k, token in enumerate(made.tokens.tolist()):
            assert token in may(0, made.tokens[:k]) and token != END[family]
        frames = len(made.tokens) // columns
        assert len(made.waveform) == frames * pipe.speech.frame_samples
        assert made.seconds == len(made.waveform) / made.sample_rate
        assert made.waveform.dtype == torch.float32 and bool((made.waveform.abs() <= 1).all())


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


def test_an_utterance_may_have_no_words(pipe: TextToSpeech, family: str) -> None:
    """The first token is the end: silence of no length, not an error."""
    window: Any = pipe.speech.window

    def end_at_once(_: Any, __: Any, made: Any) -> None:
        made.logits[..., END[family]] = 1e4

    hook = window.model.register_forward_hook(end_at_once)
    try:
        (made,) = pipe("blue cat", max_seconds=SECONDS[family]).utterances
    finally:
        hook.remove()
    assert made.is_finished and made.seconds == 0 and made.tokens.tolist() == []


def test_length_is_what_was_asked_for_or_what_there_is_room_for(
    pipe: TextToSpeech, family: str
) -> None:
    columns, rate = pipe.speech.layout.columns, pipe.speech.sample_rate
    per_frame = pipe.speech.frame_samples / rate
    cut = pipe(TEXTS * 2, seed=list(range(6)), max_seconds=2.5 * per_frame, temperature=2.0)
    longest = max(cut.utterances, key=lambda made: len(made.tokens))
    assert len(longest.tokens) == 3 * columns and not longest.is_finished  # frames are whole
    window: Any = pipe.speech.window
    with pytest.raises(OptionError, match=r"positions: expected at most 160 .* set max_seconds"):
        pipe(TEXTS[0], max_seconds=30)
    room = (160 - len(pipe.speech.encode(TEXTS[0], None))) // columns
    seen: list[int] = []
    pipe(TEXTS[0], on_step=lambda progress: seen.append(progress.tokens.shape[1]))
    assert seen[0] == room * columns + 1  # the last slot is for an end
    assert window.max_positions == 160


BAD: list[tuple[dict[str, Any], str]] = [
    (dict(text=[]), "text: expected a text or a list of them, received"),
    (dict(text="  "), "prompt: expected text to say, received '  '"),
    (dict(text=["a fox", 3]), "prompt: expected text to say, received 3"),
    (dict(text="say <|eot_id|> twice"), "expected words, received <|eot_id|>"),
    (dict(max_seconds=0), "max_seconds: expected a number in 0..3600, 0 excluded, received 0"),
    (dict(max_seconds=float("nan")), "max_seconds: expected a number"),
    (dict(max_seconds="9"), "max_seconds: expected a number"),
    (dict(batch_size=0), "batch_size: expected an integer of at least 1"),
    (dict(repetition_penalty=0.0), "penalty: expected a finite number > 0"),
    (dict(temperature=-1.0), "temperature: expected a number >= 0"),
    (dict(seed=[1, 2]), "seed"),
    (dict(policy=mmaccel.LosslessUnmask()), "policy: expected a policy such as mmaccel.Jacobi"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "said"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_before_any_pass(
    pipe: TextToSpeech, options: dict[str, Any], said: str
) -> None:
    passes: list[object] = []
    window: Any = pipe.speech.window
    hook = window.model.register_forward_pre_hook(lambda *_: passes.append(_))
    try:
        with pytest.raises(OptionError) as error:
            pipe(**({"text": "a red fox"} | options))
    finally:
        hook.remove()
    assert said in str(error.value) and passes == []


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


def test_a_checkpoint_of_another_family_is_refused(
    tiny_folder: Path, speech_folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    llasa, orpheus = speech_folders["llasa"], speech_folders["orpheus"]
    with pytest.raises(OptionError, match="family: expected one of llasa, orpheus"):
        TextToSpeech.from_pretrained(llasa[0], codec=llasa[1], family="bark")
    with pytest.raises(UnsupportedModelError, match="expected a tokenizer that knows <custom_tok"):
        TextToSpeech.from_pretrained(llasa[0], codec=orpheus[1], family="orpheus")
    with pytest.raises(UnsupportedModelError, match="expected the tensors of Xcodec2Model in"):
        TextToSpeech.from_pretrained(llasa[0], codec=orpheus[1])
    with pytest.raises(UnsupportedModelError, match="codec: expected config.json and pytorch_mod"):
        TextToSpeech.from_pretrained(orpheus[0], codec=tmp_path)
    with pytest.raises(OptionError, match="codec: expected a folder, a file, an id of the Hugg"):
        TextToSpeech.from_pretrained(orpheus[0], codec=tmp_path / "none")
    with pytest.raises(OptionError, match="model: expected a folder"):
        TextToSpeech.from_pretrained(tmp_path / "none")


def test_a_tokenizer_without_a_familys_codes_names_what_was_looked_for(
    speech_folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    from tests.checkpoints import make_tokenizer

    make_tokenizer({"<pad>": 0, "<unk>": 1}, 2, 30).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"with <\|s_0\|> or <custom_token_10>"):
        TextToSpeech.from_pretrained(tmp_path, codec=speech_folders["llasa"][1])


def test_a_codec_of_other_codes_is_refused(
    speech_folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """Fewer tokens than the codec has codes, and strides of four levels."""
    import json
    import shutil

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
    assert TextToSpeech.from_pretrained(
        speech_folders["llasa"][0], codec=speech_folders["llasa"][1]
    )


def test_the_codecs_encoders_are_let_go(speech_folders: dict[str, tuple[Path, Path]]) -> None:
    model, codec = speech_folders["llasa"]
    speech: Any = TextToSpeech.from_pretrained(model, codec=codec).speech
    names = {name.split(".")[0] for name, _ in speech.codec.named_parameters()}
    assert names == {"acoustic_decoder", "quantizer"} or names == {"acoustic_decoder"}


def test_one_run_at_a_time(pipe: TextToSpeech, family: str) -> None:
    def again(_: Any) -> None:
        pipe("blue cat", max_seconds=SECONDS[family])

    with pytest.raises(mmaccel.BusyError):
        pipe("blue cat", max_seconds=SECONDS[family], on_step=again)
    assert pipe("blue cat", max_seconds=SECONDS[family])


def test_what_deliver_raises_ends_the_run(pipe: TextToSpeech, family: str) -> None:
    def stop(made: Utterance) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipe(TEXTS, max_seconds=SECONDS[family], batch_size=1, deliver=stop)
    unfit: Any = 3
    with pytest.raises(OptionError, match="deliver: expected a function, received 3"):
        pipe(TEXTS, max_seconds=SECONDS[family], deliver=unfit)
