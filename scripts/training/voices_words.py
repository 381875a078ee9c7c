"""The words that `voices` says, by what they do in a sentence, sentences made of them, and the
text's side of its folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mmaccel.pipelines.models.voices import FILE
from mmaccel.pipelines.models.voices_vocabulary import DIGITS, END, PAD, list_tokens
from mmaccel.tokenizers_vq.speech_codec import SpeechCodec

TRAIN_SEED, VALIDATION_SEED, EVALUATION_SEED, CODEC_SEED = 11, 12, 13, 21
SPEAKERS = ("ada", "ben", "cleo", "dan")
LONGEST = 8
"""Words of a sentence at most."""

_GROUPS = {
    "the": "the a this that every one my your our his her",
    "adjective": """red blue green yellow white black brown orange purple grey big small large
        little long short tall round old new young warm cold hot cool fast slow quiet loud bright
        dark deep high low soft hard heavy light clean dirty dry wet empty full happy sad kind brave
        wild calm early late first second third last next strong weak sweet bitter fresh rich poor
        smooth sharp broken golden silver wooden simple gentle clever strange""",
    "noun": """circle square triangle star cross line picture window token model machine computer
        engine signal voice sound music song word letter number answer question story book page
        paper pencil table chair door house room garden kitchen street road bridge river lake sea
        ocean island mountain hill forest tree flower grass leaf stone sand water fire wind rain
        snow cloud sky sun moon morning evening night day week month year summer winter spring
        autumn bird cat dog horse cow sheep fish mouse rabbit fox bear lion tiger snake spider
        bread butter cheese milk coffee tea sugar apple pear lemon orange cherry carrot tomato
        potato onion soup dinner breakfast lunch mother father sister brother friend child boy girl
        man woman teacher doctor farmer sailor driver singer writer king queen city village market
        station train car bus boat ship plane wheel ticket letter box bag coat hat shoe ring watch
        clock key lamp candle mirror bottle cup plate knife spoon hand foot head face eye ear nose
        mouth heart shoulder finger game ball team school office hospital church tower wall roof
        floor corner field path journey dream idea reason secret treasure planet ship robot shadow
        colour circus thunder measure future village method science language weather""",
    "verb": """moves runs walks jumps falls rises turns stops starts opens closes shines sings
        speaks listens sleeps wakes waits works plays reads writes draws paints builds breaks
        carries brings takes gives finds loses keeps holds sees hears watches follows leads meets
        leaves comes goes stays grows changes burns freezes flies swims travels learns teaches
        remembers forgets likes loves wants needs knows thinks says asks makes""",
    "preposition": "in on over under near behind beside above below between through around to from "
    "with without before after for of by into across",
    "adverb": "slowly quickly quietly loudly gently always never often again soon now today "
    "tomorrow together away here there very almost only still left right up down",
    "digit": " ".join(DIGITS),
    "number": """ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
        twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million""",
    "time": "monday tuesday wednesday thursday friday saturday sunday january february march april "
    "may june july august september october november december minute hour second",
    "small": """and or but not is are was will can has it he she we they you i hello goodbye please
        thank yes no okay what who where when why how welcome sorry hey all some many more most
        both other same so then than if because while percent point minus plus equal""",
}

GROUPS: dict[str, tuple[str, ...]] = {
    name: tuple(dict.fromkeys(words.split())) for name, words in _GROUPS.items()
}
WORDS: tuple[str, ...] = tuple(sorted({word for group in GROUPS.values() for word in group}))

_PATTERNS = (
    "the adjective noun verb",
    "the noun verb adverb",
    "the noun verb preposition the noun",
    "the adjective noun verb preposition the noun",
    "the adjective noun verb preposition the adjective noun",
    "the noun and the noun",
    "digit digit digit",
    "digit digit digit digit digit",
    "digit noun preposition time",
    "number digit adjective noun",
    "small the noun verb adverb",
    "small small the adjective noun",
    "time preposition the noun",
    "small small adverb",
)
_RANDOM_SHARE = 0.5


def make_sentence(seed: int, index: int) -> tuple[str, ...]:
    """Sentence `index` of an endless list that `seed` fixes: 1 to 8 words.

    Half of the sentences follow a pattern, half are words drawn at random, so that every word is
    learnt in every neighbourhood.
    """
    rng = np.random.default_rng((seed, index))
    if rng.random() < _RANDOM_SHARE:
        count = int(rng.integers(1, LONGEST + 1))
        return tuple(WORDS[k] for k in rng.integers(len(WORDS), size=count))
    pattern = _PATTERNS[rng.integers(len(_PATTERNS))]
    words = []
    for name in pattern.split():
        if name in GROUPS:
            words.append(GROUPS[name][rng.integers(len(GROUPS[name]))])
        else:
            words.append(name)
    return tuple(words)


def save_text_side(
    folder: Path,
    codec: SpeechCodec,
    speakers: Sequence[str],
    lexicon: Mapping[str, Sequence[str]],
    longest: int,
    codes: int | None = None,
    **more: object,
) -> list[str]:
    """Writes the tokenizer's files and `voices.json`: of a codec's codes, speakers of whom the
    first is the default, phonemes of every word, most words of a text, and `more`. The tokenizer
    has tokens for so many `codes`; None: for those of the flat layout.

    Returns:
        The tokens in the order of their ids.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = list_tokens(codec.flat_size if codes is None else codes, speakers, lexicon)
    ids = {token: k for k, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    facts = {
        "longest": longest,
        "sample_rate": codec.sample_rate,
        "frame_samples": codec.hop,
        "speakers": list(speakers),
        "words": {word: list(phonemes) for word, phonemes in lexicon.items()},
        **more,
    }
    (folder / FILE).write_text(json.dumps(facts) + "\n", encoding="utf-8")
    return tokens
