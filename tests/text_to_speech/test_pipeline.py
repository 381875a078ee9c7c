"""Text to speech: transformers' own tokens, lengths, ends, seeds, and texts that are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmaccel import Jacobi, TextToSpeech
from mmaccel.contracts import FinishedRow
from mmaccel.errors import NumericsError, OptionError, UnsupportedModelError
from mmaccel.pipelines.hosts.loading.checkpoint import check_prompt
from mmaccel.pipelines.text_to_speech.pipeline import finish_utterance
from mmaccel.pipelines.text_to_speech.plan import count_slots, pick_params
from mmaccel.tokenizers_vq.frames import Frames
from tests.fixtures.media import open_media
from tests.fixtures.shared import media_folders, media_pipe
from tests.fixtures.speech import END, FAMILIES, FIRST, LLASA_CODES, SECONDS, SNAC_CODES, TEXTS

SEEDS = [3, 4, 5]
CODES = {"llasa": 40, "orpheus": 42}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def pipe(family: str) -> TextToSpeech:
    """One for all tests that leave it as it was."""
    made: TextToSpeech = media_pipe(family)
    return made


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


def test_greedy_tokens_are_those_of_transformers(pipe: TextToSpeech, family: str) -> None:
    options: dict[str, Any] = dict(temperature=0.0, top_p=1.0, repetition_penalty=1.3)
    speech = pipe(TEXTS, policy=Jacobi(window=6), max_seconds=SECONDS[family], **options)
    for text, made in zip(TEXTS, speech.utterances, strict=True):
        assert made.tokens.tolist() == generated(pipe, family, text, 1.3)
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
    recommended = pipe.speech.params
    assert recommended.top_k == {"llasa": 50, "orpheus": None}[family]
    options: dict[str, Any] = dict(seed=SEEDS, max_seconds=SECONDS[family])
    plain, said, other = (
        [one.tokens.tolist() for one in pipe(TEXTS, **options, **asked).utterances]
        for asked in ({}, own, {**own, "temperature": 1.5})
    )
    assert plain == said != other


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


@pytest.mark.parametrize(
    ("tokens", "codes", "is_finished"),
    [
        ([5, 6, 5, 6, 9], [5, 6, 5, 6], True),  # the end at the very last slot
        ([5, 6, 5, 6, 5], [5, 6, 5, 6], False),  # a code there: cut
        ([5, 6, 9], [5, 6], True),
        ([9], [], True),
    ],
)
def test_where_an_utterance_ends(tokens: list[int], codes: list[int], is_finished: bool) -> None:
    """Two frames of two codes and a slot for the end, which is 9."""
    rendered: list[tuple[list[int], int]] = []

    def render(given: torch.Tensor, seed: int) -> torch.Tensor:
        rendered.append((given.tolist(), seed))
        return given / 10

    layout = Frames(((5, 6), (6, 7)), 10, (9,))
    speech: Any = SimpleNamespace(layout=layout, render=render, sample_rate=8)
    plan: Any = SimpleNamespace(
        texts=["a", "b"], owners=[0, 1], voice="leo", seeds=[3, 7], n_codes=4,
        prompt=SimpleNamespace(slots=None),
    )  # fmt: skip
    made = finish_utterance(
        speech, plan, FinishedRow(1, torch.tensor(tokens), 4, [], 0.25), index=1
    )
    assert made.tokens.tolist() == codes
    assert rendered == ([(codes, 7)] if codes else [])
    assert made.waveform.tolist() == pytest.approx([code / 10 for code in codes])
    assert made.is_finished is is_finished and made.seconds == len(codes) / 8
    assert (made.index, made.text, made.voice, made.seed) == (1, "b", "leo", 7)
    assert (made.passes, made.total_variation, made.sample_rate) == (4, 0.25, 8)


def test_the_penalty_counts_the_whole_prefix(pipe: TextToSpeech, family: str) -> None:
    speech = pipe.speech
    processor = pick_params(speech, repetition_penalty=2.0).processor
    assert processor is not None
    tokens = torch.full((1, 5000), 31)
    tokens[0, 0] = 30
    scores = torch.ones(1, 1, speech.window.vocab_size)
    punished = processor(scores, tokens, torch.tensor([[5000]]))[0, 0]
    assert punished[29:33].tolist() == [1, 0.5, 0.5, 1]
    assert pick_params(speech, repetition_penalty=1).processor is None
    usual = pick_params(speech).processor
    if family == "llasa":
        assert usual is None
    else:
        assert usual is not None
        punished = usual(scores, tokens, torch.tensor([[5000]]))[0, 0]
        assert punished[29:33].tolist() == pytest.approx([1, 1 / 1.3, 1 / 1.3, 1])


def test_length_is_the_given_one_or_what_the_model_has_positions_for(
    pipe: TextToSpeech, family: str
) -> None:
    columns, rate = pipe.speech.layout.columns, pipe.speech.sample_rate
    per_frame = pipe.speech.frame_samples / rate
    cut = pipe(TEXTS * 2, seed=list(range(6)), max_seconds=2.5 * per_frame, temperature=2.0)
    longest = max(cut.utterances, key=lambda made: len(made.tokens))
    assert len(longest.tokens) == 3 * columns and not longest.is_finished  # frames are whole
    window: Any = pipe.speech.window
    frames = (160 - len(pipe.speech.encode(TEXTS[0], None))) // columns
    seen: list[int] = []
    pipe(TEXTS[0], on_step=lambda progress: seen.append(progress.tokens.shape[1]))
    assert seen[0] == frames * columns + 1  # the last slot is for an end
    assert window.max_positions == 160


def _model(limit: int | None, columns: int, rate: int, frame: int) -> Any:
    return SimpleNamespace(
        layout=SimpleNamespace(columns=columns),
        window=SimpleNamespace(max_positions=limit),
        sample_rate=rate,
        frame_samples=frame,
    )


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
        frames = (model.window.max_positions - prompt) // model.layout.columns
        assert count_slots(model, prompt, float(seconds)) <= frames * model.layout.columns + 1
        assert count_slots(model, prompt, None) == frames * model.layout.columns + 1
    for prompt, limit in ((100, 100), (200, 100), (94, 100)):
        for asked in (None, 1.0):
            with pytest.raises(OptionError, match="; shorten the text$"):
                count_slots(_model(limit, 7, 24000, 2048), prompt, asked)


def test_seeds_are_reported_as_unsigned_numbers(pipe: TextToSpeech, family: str) -> None:
    options: dict[str, Any] = dict(max_seconds=SECONDS[family], temperature=9.0)
    made = pipe(["fox", "fox"], seed=2**64 - 1, **options)
    assert [each.seed for each in made.utterances] == [2**64 - 1, 0]
    alone = pipe("fox", seed=[made[0].seed], **options)
    assert torch.equal(alone[0].waveform, made[0].waveform) and len(alone[0].waveform)


def test_control_tokens_are_searched_only_in_texts_with_angle_brackets() -> None:
    class Counted:
        asked = 0

        def get_added_vocab(self) -> dict[str, int]:
            self.asked += 1
            return {"<|end|>": 1}

    tokenizer = Counted()
    for text in ("a fox", "a > b", "a < b"):
        assert check_prompt(text, tokenizer) == text
    assert tokenizer.asked == 0  # tens of thousands of codes are slow to go through
    assert check_prompt("<b>a</b>", tokenizer) == "<b>a</b>"


def test_ids_that_the_model_does_not_have_are_refused_before_any_pass(
    family: str, tmp_path: Path
) -> None:
    """Codes are within the embeddings, words are not."""
    from transformers import AutoModelForCausalLM

    source, codec = media_folders(family)
    size = {"llasa": FIRST + LLASA_CODES + 5, "orpheus": FIRST + 28}[family]  # Llasa: its request
    folder = shutil.copytree(source, tmp_path / "small")
    model = AutoModelForCausalLM.from_pretrained(source)
    model.resize_token_embeddings(size)
    model.save_pretrained(folder)
    small = TextToSpeech.from_pretrained(folder, codec=codec)
    speech: Any = small.speech
    word = speech.tokenizer.convert_ids_to_tokens(size)  # the first that is missing
    speech.window.model.register_forward_pre_hook(lambda *_: pytest.fail("a pass was made"))
    with pytest.raises(UnsupportedModelError, match=f"{size} ids, .* a text with id {size};"):
        small(word, max_seconds=SECONDS[family])


def test_sound_that_is_no_number_names_its_text(family: str) -> None:
    own_pipe = open_media(family, media_folders(family))
    speech: Any = own_pipe.speech
    codec = speech.codec
    plain, decoded = codec.decode, []

    def decode(codes: Any) -> Any:
        made = plain(codes)
        decoded.append(made)
        if len(decoded) == 2:
            (made if family == "orpheus" else made.audio_values)[..., -1] = float("nan")
        return made

    codec.decode = decode
    delivered: list[int] = []
    with pytest.raises(NumericsError, match="waveform: expected samples in -1..1") as error:
        own_pipe(
            ["fox"] * 3, seed=[3, 4, 5], max_seconds=SECONDS[family], batch_size=1,
            deliver=lambda made: delivered.append(made.index), temperature=9.0,
        )  # fmt: skip
    assert error.value.rows == (1,) and delivered == [0]


def test_nan_of_the_model_names_its_text(family: str) -> None:
    own_pipe = open_media(family, media_folders(family))
    speech: Any = own_pipe.speech
    window = speech.window
    words = window.model.get_input_embeddings()
    odd = speech.tokenizer("cat")["input_ids"][-1]
    with torch.no_grad():
        words.weight[odd] = float("nan")
    for rows, named in ((1, (1,)), (None, (1, 3))):
        with pytest.raises(NumericsError) as error:
            own_pipe(["fox", "cat", "fox", "cat"], max_seconds=SECONDS[family], batch_size=rows)
        assert error.value.rows == named
