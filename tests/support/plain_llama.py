"""Llama as in llama2.c, with numpy only, one token and one head at a time: a reference that shares no code with the
package."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


class PlainLlama:
    """The file: width, hidden, layers, heads, key-value heads, vocabulary (negative: the head has its own matrix), and
    the longest text; then 32-bit numbers, each kind of weight for all layers."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        sizes = struct.unpack("<7i", content[:28])
        self.width, self.hidden, self.layers, self.heads, self.kv_heads, vocab, self.longest = sizes
        self.vocab, self.head = abs(vocab), self.width // self.heads
        numbers, at = np.frombuffer(content, "<f4", offset=28), 0

        def take(*shape: int) -> np.ndarray:
            nonlocal at
            count = int(np.prod(shape))
            at += count
            return numbers[at - count : at].reshape(shape).astype(np.float32)

        w, h, n, kv = self.width, self.hidden, self.layers, self.kv_heads * self.head
        self.embed = take(self.vocab, w)
        self.attention_norm = take(n, w)
        self.q, self.k, self.v, self.o = take(n, w, w), take(n, kv, w), take(n, kv, w), take(n, w, w)
        self.channel_norm = take(n, w)
        self.w1, self.w2, self.w3 = take(n, h, w), take(n, w, h), take(n, h, w)
        self.norm = take(w)
        take(2, self.longest, self.head // 2)  # cosines and sines, computed below
        self.out = self.embed if vocab > 0 else take(self.vocab, w)
        assert at == len(numbers)
        self.keys: list[list[np.ndarray]] = [[] for _ in range(n)]
        self.values: list[list[np.ndarray]] = [[] for _ in range(n)]

    def step(self, token: int) -> np.ndarray:
        """The scores of the token after this one."""
        place = len(self.keys[0])
        x = self.embed[token].copy()
        for n in range(self.layers):
            h = rms(x, self.attention_norm[n])
            q = turned((self.q[n] @ h).reshape(self.heads, self.head), place)
            self.keys[n].append(turned((self.k[n] @ h).reshape(self.kv_heads, self.head), place))
            self.values[n].append((self.v[n] @ h).reshape(self.kv_heads, self.head))
            seen = []
            for head in range(self.heads):
                shared = head * self.kv_heads // self.heads
                scores = np.array([q[head] @ key[shared] for key in self.keys[n]]) / np.sqrt(self.head)
                chances = np.exp(scores - scores.max())
                chances /= chances.sum()
                seen.append(sum(c * value[shared] for c, value in zip(chances, self.values[n], strict=True)))
            x = x + self.o[n] @ np.concatenate(seen)
            h = rms(x, self.channel_norm[n])
            gate = self.w1[n] @ h
            x = x + self.w2[n] @ (gate / (1 + np.exp(-gate)) * (self.w3[n] @ h))
        return self.out @ rms(x, self.norm)

    def story(self, prompt: list[int], steps: int) -> list[int]:
        """The likeliest token each time, until the end mark (2) or the next text (1)."""
        said = list(prompt)
        for token in prompt[:-1]:
            self.step(token)
        while len(said) < steps:
            best = int(self.step(said[-1]).argmax())
            if best in (1, 2):
                break
            said.append(best)
        return said[len(prompt) :]


def rms(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean() + 1e-5) * gain


def turned(x: np.ndarray, place: int) -> np.ndarray:
    """Rotate neighbours 0 and 1, 2 and 3, … of each head."""
    found = x.copy()
    for i in range(0, x.shape[1], 2):
        angle = place * 10000.0 ** (-i / x.shape[1])
        cos, sin = np.cos(angle), np.sin(angle)
        found[:, i], found[:, i + 1] = x[:, i] * cos - x[:, i + 1] * sin, x[:, i] * sin + x[:, i + 1] * cos
    return found


class PlainPieces:
    """tokenizer.bin: the longest piece's length; then of each piece its score, its length and its bytes."""

    def __init__(self, path: Path) -> None:
        content, at = path.read_bytes(), 4
        self.pieces: list[tuple[bytes, float]] = []
        while at < len(content):
            score, size = struct.unpack_from("<fi", content, at)
            self.pieces.append((content[at + 8 : at + 8 + size], score))
            at += 8 + size
        self.number = {piece: n for n, (piece, _) in reversed(list(enumerate(self.pieces)))}

    def encode(self, text: str) -> list[int]:
        """Begin mark, a space, the characters (or their bytes); then the best pair is joined, while there is one."""
        ids = [1, self.number[b" "]] if text else [1]
        for char in text:
            raw = char.encode()
            ids += [self.number[raw]] if raw in self.number else [byte + 3 for byte in raw]
        while True:
            best = None
            for place in range(len(ids) - 1):
                joined = self.number.get(self.pieces[ids[place]][0] + self.pieces[ids[place + 1]][0])
                if joined is not None and (best is None or self.pieces[joined][1] > best[0]):
                    best = (self.pieces[joined][1], place, joined)
            if best is None:
                return ids
            ids[best[1] : best[1] + 2] = [best[2]]


# --- files of a small model -------------------------------------------------------------------------------------------

PIECES = [" ", "a", "b", "c", "t", "h", "e", "ä", "李", "th", " t", "he", "the", " the", "ab", "  ", "bc", " a"]
SCORES = {"th": -1, " t": -2, "he": -3, "the": -5, " the": -4, "ab": -6, "  ": -8, "bc": -7, " a": -9}
VOCAB = 259 + len(PIECES)


def write_stories(folder, width=24, hidden=20, layers=2, heads=3, kv_heads=3, tied=True, longest=40, seed=0):
    """A small random model in its folder, with its vocabulary; the path of the model."""
    dice = np.random.default_rng(seed)
    head, kv = width // heads, width // heads * kv_heads
    shapes = [(VOCAB, width), (layers, width), (layers, width, width), (layers, kv, width), (layers, kv, width)]
    shapes += [(layers, width, width), (layers, width), (layers, hidden, width), (layers, width, hidden)]
    shapes += [(layers, hidden, width), (width,), (2, longest, head // 2)] + ([] if tied else [(VOCAB, width)])
    sizes = struct.pack("<7i", width, hidden, layers, heads, kv_heads, VOCAB if tied else -VOCAB, longest)
    weights = [dice.normal(size=shape) * (0.4 if len(shape) > 1 else 1) for shape in shapes]
    path = folder / "stories.bin"
    path.write_bytes(sizes + b"".join(weight.astype("<f4").tobytes() for weight in weights))
    spelled = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(f"<0x{n:02X}>".encode() for n in range(256))]
    pieces = [(raw, 0.0) for raw in spelled] + [(text.encode(), SCORES.get(text, -100.0)) for text in PIECES]
    body = b"".join(struct.pack("<fi", score, len(raw)) + raw for raw, score in pieces)
    (folder / "tokenizer.bin").write_bytes(struct.pack("<i", 8) + body)
    return path
