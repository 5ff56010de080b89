"""
Byte-level BPE: trained here, run by tiktoken.

Training starts from the 256 bytes and again and again fuses the most frequent pair of neighbours
into a new token. Text is first cut into pre-tokens (a word, a number, a run of signs, a line break
with its indentation), and no token ever crosses a cut. So it is enough to know each distinct
pre-token and how often it came: 8 MB of source are 100,000 of them, and a fusion touches only those
that hold the pair.

    >>> merges = train_bpe({"aaab": 2, "ab": 1}, 258)     # (a, a) came 4 times, no pair more
    >>> [(bytes([a, b])) for a, b in merges[:1]]
    [b'aa']
    >>> Tokenizer(merges).encode("aaab")                  # 256 = aa, 257 = ab
    [256, 257]
"""
import hashlib
import heapq
import re
from collections import Counter, defaultdict

import tiktoken

# A word with the space before it | up to three digits | signs | a line break and the indentation
# after it | other blanks. Only explicit ASCII classes, so that Python's re (which counts here) and
# tiktoken's regex engine (which encodes) cut alike; everything outside ASCII counts as part of a
# word.
WORD = r"[^\x00-@\[-^`{-\x7f]"
SIGN = r"[\x21-/:-@\[-^`{-\x7f\x00-\x08\x0e-\x1f]"
PATTERN = (rf" ?{WORD}{{1,64}}| ?[0-9]{{1,3}}| ?{SIGN}{{1,64}}|\r?\n[ \t\r\n]{{0,64}}"
           r"|[ \t\x0b\x0c\r]{1,64}")  # bounded: fusing is quadratic in the length of a pre-token
STOP = "<|endoftext|>"


def count_pretokens(texts):
    """texts: iterable of str -> Counter of pre-tokens."""
    pattern, counts = re.compile(PATTERN), Counter()
    for text in texts:
        counts.update(pattern.findall(text))
    return counts


def train_bpe(counts, vocab_size):
    """counts {pre-token: how often} -> list of (left id, right id), at most vocab_size - 256 of
    them.

    Fewer when the text allows no more. Ties go to the smaller pair, so the result depends on
    nothing but the counts (Sennrich et al. 2016, with the bytes of GPT-2 as alphabet)."""
    words = [(list(word.encode("utf-8")), n) for word, n in counts.items()]
    pairs, holders = Counter(), defaultdict(set)  # how often each pair comes, and in which words
    for index, (ids, n) in enumerate(words):
        for pair in zip(ids, ids[1:]):
            pairs[pair] += n
            holders[pair].add(index)
    heap = [(-n, pair) for pair, n in pairs.items()]
    heapq.heapify(heap)
    known = {bytes([i]): i for i in range(256)}
    text = list(known)  # id -> its bytes
    merges = []
    while heap and 256 + len(merges) < vocab_size:
        n, pair = heapq.heappop(heap)
        if -n != pairs[pair]:  # the count has changed since this entry was made
            if pairs[pair] > 0:
                heapq.heappush(heap, (-pairs[pair], pair))
            continue
        fused = text[pair[0]] + text[pair[1]]
        if fused not in known:
            # subtle: two pairs can spell the same bytes, and bytes are what tiktoken looks up. The
            # second pair then becomes the token that the first has made.
            known[fused] = len(text)
            text.append(fused)
            merges.append(pair)
        fuse(words, pairs, holders, heap, pair, known[fused])
    return merges


def fuse(words, pairs, holders, heap, pair, new):
    """Replace the pair by its token wherever it stands, and bring the counts up to date."""
    changed = set()
    for index in holders.pop(pair):
        ids, n = words[index]
        for old in zip(ids, ids[1:]):
            pairs[old] -= n
        ids[:] = replace(ids, pair, new)
        for now in zip(ids, ids[1:]):
            pairs[now] += n
            holders[now].add(index)
            if new in now:
                changed.add(now)
    for now in changed:  # other pairs only become rarer: the heap notices when they come up
        heapq.heappush(heap, (-pairs[now], now))


def replace(ids, pair, new):
    """[1, 1, 1, 2], (1, 1), 9 -> [9, 1, 2]: from left to right, without overlap."""
    out, i = [], 0
    while i < len(ids):
        if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


class Tokenizer:
    """Ids 0..255 are bytes, then the merges in order, then the stop token that stands between
    files."""

    def __init__(self, merges):
        self.merges = [(int(a), int(b)) for a, b in merges]
        text = [bytes([i]) for i in range(256)]
        for a, b in self.merges:
            text.append(text[a] + text[b])
        self.ranks = {token: i for i, token in enumerate(text)}
        if len(self.ranks) != len(text):
            raise ValueError("two merges spell the same token")
        self.stop = len(text)
        self.vocab_size = len(text) + 1
        self.bpe = tiktoken.Encoding("hydra", pat_str=PATTERN, mergeable_ranks=self.ranks,
                                     special_tokens={STOP: self.stop})
        self.hash = hashlib.sha256(repr(self.merges).encode()).hexdigest()[:16]

    def encode(self, text):
        """Ids of a text. What spells the stop token is plain text: nobody ends a text from
        within."""
        return self.bpe.encode_ordinary(text)

    def encode_all(self, texts):
        """One row of ids, the stop token after each text."""
        return [i for text in texts for i in (*self.encode(text), self.stop)]

    def decode_bytes(self, ids):
        """The bytes of these ids; the stop token has none."""
        return self.bpe.decode_bytes([i for i in ids if i != self.stop])

    def decode(self, ids):
        """Text; bytes that are no UTF-8 (a character cut in two) come out as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def standard_prompts(tokenizer, texts, length, most=64):
    """Up to `most` prompts of `length` tokens from held-out texts, as lists of ids. Each begins
    with a line that isn't indented, and its text encodes to the same ids again: it can be given on
    the command line."""
    prompts = []
    for place in range(40):
        for text in texts:
            line = re.compile(r"\n(?=\S)").search(text, len(text) * place // 40)
            begin = line.end() if line else len(text)
            ids = tokenizer.encode(text[begin:begin + 20 * length])[:length]
            whole = len(ids) == length and tokenizer.encode(tokenizer.decode(ids)) == ids
            if whole and ids not in prompts and len(prompts) < most:
                prompts.append(ids)
    return prompts
