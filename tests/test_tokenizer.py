"""BPE: training against a slow restatement, encoding against a plain loop over the same ranks."""
import doctest
import re
from collections import Counter

import pytest
from helpers import CASES
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenizer
from tokenizer import PATTERN, Tokenizer, count_pretokens, standard_prompts, train_bpe

texts = st.text(st.sampled_from("ab\n \t_09é漢.\"'x"), max_size=80)


def slow_train(counts, vocab_size):
    """Count all pairs anew for every merge."""
    words = [([bytes([b]) for b in word.encode()], n) for word, n in counts.items()]
    ids = {bytes([i]): i for i in range(256)}
    merges = []
    while 256 + len(merges) < vocab_size:
        pairs = Counter()
        for word, n in words:
            for a, b in zip(word, word[1:]):
                pairs[ids[a], ids[b]] += n
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        text = list(ids)
        a, b = text[best[0]], text[best[1]]
        if a + b not in ids:
            ids[a + b] = len(ids)
            merges.append(best)
        for word, _ in words:
            i = 0
            while i + 1 < len(word):
                if (word[i], word[i + 1]) == (a, b):
                    word[i:i + 2] = [a + b]
                i += 1
    return merges


def slow_encode(tok, text):
    """Of all neighbours that are a token, fuse the one of the lowest rank; until none is left."""
    out = []
    for piece in re.findall(PATTERN, text):
        parts = [bytes([b]) for b in piece.encode()]
        while True:
            ranks = [tok.ranks.get(a + b, 1 << 30) for a, b in zip(parts, parts[1:])]
            if not ranks or min(ranks) == 1 << 30:
                break
            i = ranks.index(min(ranks))
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        out += [tok.ranks[part] for part in parts]
    return out


@settings(max_examples=150 * CASES)
@given(st.lists(texts, max_size=6), st.integers(256, 290))
def test_training_equals_the_slow_restatement(lines, vocab_size):
    counts = count_pretokens(lines)
    assert train_bpe(counts, vocab_size) == slow_train(counts, vocab_size)


@settings(max_examples=150 * CASES)
@given(st.lists(texts, max_size=6), st.text(max_size=60), st.integers(256, 290))
def test_round_trip_and_equality_with_a_plain_loop(lines, text, vocab_size):
    tok = Tokenizer(train_bpe(count_pretokens(lines), vocab_size))
    for sample in (*lines, text):
        ids = tok.encode(sample)
        assert tok.decode(ids) == sample
        assert ids == slow_encode(tok, sample)


@given(st.text(max_size=200))
def test_pretokens_lose_nothing(text):
    assert "".join(re.findall(PATTERN, text)) == text


@pytest.mark.parametrize("text", ["", " ", "      ", "ab", "a", "\n\n"])
def test_small_texts_stop_early(text):
    tok = Tokenizer(train_bpe(count_pretokens([text]), 5000))
    assert tok.vocab_size < 270
    assert tok.decode(tok.encode(text)) == text


def test_stop_token_in_a_text_is_text():
    tok = Tokenizer(train_bpe({"the": 9}, 300))
    ids = tok.encode("a<|endoftext|>b")
    assert tok.stop not in ids and tok.decode(ids) == "a<|endoftext|>b"
    assert tok.decode([*ids, tok.stop]) == "a<|endoftext|>b"


def test_hash_tells_tokenizers_apart():
    one, other = Tokenizer([(97, 98)]), Tokenizer([(97, 99)])
    assert one.hash != other.hash and one.hash == Tokenizer([(97, 98)]).hash


def test_twice_the_same_token_is_refused():
    with pytest.raises(ValueError, match="two merges spell the same token"):
        Tokenizer([(97, 98), (97, 98)])


def test_examples_in_docstrings():
    assert doctest.testmod(tokenizer).failed == 0 < doctest.testmod(tokenizer).attempted


def test_standard_prompts_are_pieces_of_the_texts():
    """Of the asked length, distinct, from the start of a line that isn't indented, and the same
    when given as text on a command line."""
    texts = [f"x = {i}\n    y = '{i * 7919}é'\nclass A{i}:\n    pass\n\n" * 9 for i in range(5)]
    tokenizer = Tokenizer(train_bpe(count_pretokens(texts), 400))
    prompts = standard_prompts(tokenizer, texts, 12, most=7)
    assert len(prompts) == 7 == len({tuple(ids) for ids in prompts})
    for ids in prompts:
        text = tokenizer.decode(ids)
        assert len(ids) == 12 and tokenizer.encode(text) == ids
        assert any("\n" + text in whole for whole in texts) and not text[0].isspace()
    assert standard_prompts(tokenizer, ["one line only", ""], 12) == []
