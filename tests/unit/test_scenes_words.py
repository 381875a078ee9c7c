"""Caption words and their ids."""

import pytest

from mmaccel.demo.scenes_words import CaptionWords
from mmaccel.errors import OptionError

WORDS = CaptionWords(n_image_tokens=10, words=("a", "red", "circle"), max_words=4)


def test_ids_come_after_the_picture_tokens() -> None:
    assert (WORDS.bos, WORDS.boi, WORDS.pad, WORDS.vocab_size) == (10, 11, 12, 16)
    assert WORDS.encode("a red circle") == [10, 13, 14, 15, 11]
    assert WORDS.unconditional() == [10, 11]


def test_capitals_and_punctuation_do_not_matter() -> None:
    assert WORDS.encode("  A, red-CIRCLE. ") == WORDS.encode("a red circle")


def test_decode_skips_what_is_no_word() -> None:
    assert WORDS.decode([10, 13, 14, 15, 11, 3, 9, 12]) == "a red circle"


def test_bad_captions_are_named() -> None:
    with pytest.raises(OptionError, match=r"received .*'blue'.*; it knows: a red circle"):
        WORDS.encode("a blue dog")
    with pytest.raises(OptionError, match="at most 4 words, received 5"):
        WORDS.encode("a a a a a")
    with pytest.raises(OptionError, match="at least one word, received none"):
        WORDS.encode(" , ")


def test_the_list_has_no_word_twice_and_all_that_was_promised() -> None:
    words = CaptionWords(1000).words
    assert len(set(words)) == len(words)
    promised = (
        "red green blue yellow purple orange white circle square triangle star ring small large "
        "above below left right of inside on grass sand water snow at night"
    )
    assert set(promised.split()) <= set(words)
