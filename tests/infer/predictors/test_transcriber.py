"""Transcription as promises to a user; a script sets what the model says in each window.

(tests/parity/test_transcription_against_transformers.py compares it with a reference.)
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from allyouneed.data.files.sounds import TranscribedSound
from allyouneed.data.tokenizers.base import Tokenizer as Ours
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.predictors.transcriber import Transcriber
from allyouneed.nn.context import Memory, TokenLayout

SPECIALS = ["<end>", "<start>", "<en>", "<de>", "<translate>", "<transcribe>", "<previous>", "<nospeech>", "<notimes>"]
END, START, EN, DE, TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NOTIMES = range(256, 256 + len(SPECIALS))
TIME = NOTIMES + 1  # 0.00; windows of two seconds
VOCAB = TIME + 101
RATE = 16_000


def tokenizer() -> Ours:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return Ours(made, END, END, END, template=Template())


LETTERS = tokenizer()


def at(seconds: float) -> int:
    return TIME + round(seconds / 0.02)


def said(*parts: float | str) -> list[int]:
    """Times and texts as tokens."""
    return [
        token for part in parts for token in (LETTERS.encode(part) if isinstance(part, str) else [at(part)])
    ]  # fmt: skip


class Script(torch.nn.Module):
    """Generates the script, window by window; `sure`: how much likelier than all else it makes each token. `no_speech`:
    how likely the token is that says no speech detected, in each window."""

    def __init__(
        self, windows: list[list[int]], sure: float = 12.0, no_speech: float = 0.0, language: int = DE
    ) -> None:
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(source_embed=SimpleNamespace(mels=8), limit=64)
        self.windows, self.sure, self.no_speech, self.language = windows, sure, no_speech, language
        self.decoder = SimpleNamespace(new_states=list)
        self.heard = 0
        self.prompts: list[list[int]] = []
        self.frames: list[torch.Tensor] = []

    def encode(self, source):
        count = len(source.values)
        numbers = torch.arange(self.heard, self.heard + count).float()
        self.heard += count
        self.frames += list(source.values)
        return Memory(numbers.view(-1, 1, 1), TokenLayout(torch.zeros(1, 1, dtype=torch.long), start=0))

    def advance(self, new, states, last=False):
        """Hidden states say which window it is and how many tokens came after the prompt; -1 stands for the start."""
        window = states.memory.hidden[:, 0, 0]
        hidden = torch.zeros(*new.tokens.shape, 2)
        hidden[..., 0] = window[:, None]
        for row, tokens in enumerate(new.tokens.tolist()):
            if START in tokens or TRANSCRIBE in tokens:
                self.prompts.append(tokens)
                hidden[row, :, 1] = 0
                hidden[row, tokens.index(START), 1] = -1 if len(tokens) > 1 else -2
                states.prompt = len(tokens)
            else:
                hidden[row, :, 1] = states.lengths[row] - states.prompt + 1
        states.lengths = [seen + new.tokens.shape[1] for seen in states.lengths]
        return hidden

    def head(self, hidden):
        logits = torch.zeros(*hidden.shape[:-1], VOCAB)
        for place in range(hidden[..., 0].numel()):
            window, step = (int(n) for n in hidden.reshape(-1, 2)[place])
            row = logits.view(-1, VOCAB)[place]
            if step == -2:
                row[self.language] = 9
            elif step == -1:
                row[NO_SPEECH] = torch.tensor(self.no_speech * (VOCAB - 1) / (1 - self.no_speech) + 1e-9).log()
            else:
                script = [*self.windows[window % len(self.windows)], END]
                row[script[min(step, len(script) - 1)]] = self.sure
        return logits


def listener(windows, multilingual=True, **more) -> Transcriber:
    task = {"kind": "transcription", "start": START, "end": END, "no_timestamps": NOTIMES, "previous": PREVIOUS}
    task |= {"no_speech": NO_SPEECH, "seconds": 2.0, "suppress": [START, PREVIOUS, NO_SPEECH]}
    if multilingual:
        task |= {"languages": {"en": EN, "de": DE}, "tasks": {"translate": TRANSLATE, "transcribe": TRANSCRIBE}}
    return Transcriber(Folder(Script(windows, **more), Vocabularies(LETTERS, LETTERS), task))


def noise(seconds: float) -> torch.Tensor:
    return 0.1 * torch.randn(int(seconds * RATE), generator=torch.Generator().manual_seed(0))


def test_a_short_sound_becomes_text():
    model = listener([said("hello there")])
    assert model.transcribe(noise(1.5), beam=1) == "hello there"
    assert model.transcribe([noise(1.5)], beam=1) == ["hello there"]
    (full,) = model.transcribe_full([noise(1.5)], beam=1)
    assert (full.language, full.seconds, full.notes) == ("de", 1.5, [])
    assert [(s.start, s.end, s.text) for s in full.segments] == [(0.0, 1.5, "hello there")]
    assert model.model.prompts[-1] == [START, DE, TRANSCRIBE, NOTIMES]


def test_language_and_task_are_prompt_tokens():
    model = listener([said("hello")])
    model.transcribe(noise(1), language="en", task="translate", beam=1)
    assert model.model.prompts == [[START, EN, TRANSLATE, NOTIMES]]
    english = listener([said("hello")], multilingual=False)
    english.transcribe(noise(1), beam=1, timestamps=True)
    assert english.model.prompts[0] == [START]


def test_a_long_sound_resumes_at_the_end_of_the_last_segment():
    """The first window's last piece was cut off at its end: the second window begins with it."""
    model = listener(
        [said(0.0, "one", 0.5, 0.5, "two", 1.2, 1.2, "thr"), said(0.1, "three", 0.8, 0.8, "fo"), said(0.0, "four", 0.9)]
    )
    (full,) = model.transcribe_full([noise(3.0)], beam=1, temperatures=(0.0,))
    found = [(round(s.start, 2), round(s.end, 2), s.text) for s in full.segments]
    assert found == [(0.0, 0.5, "one"), (0.5, 1.2, "two"), (1.3, 2.0, "three"), (2.0, 2.9, "four")]
    assert full.text == "onetwothreefour"
    first, second, third = model.model.frames
    torch.testing.assert_close(first[:, 120:200], second[:, :80])
    torch.testing.assert_close(second[:, 80:180], third[:, :100])
    assert not third[:, 100:].any() and third[:, :100].any(), "after the end all is 0"


def test_each_window_is_prompted_with_the_previous_text():
    model = listener([said(0.0, "ab", 1.0, 1.0), said(0.0, "cd", 2.0)])
    model.transcribe(noise(3.0), language="de", beam=1)
    assert model.model.prompts == [
        [START, DE, TRANSCRIBE],
        [PREVIOUS, *said(0.0, "ab", 1.0), START, DE, TRANSCRIBE],
    ]
    alone = listener([said(0.0, "ab", 1.0, 1.0), said(0.0, "cd", 2.0)])
    alone.transcribe(noise(3.0), language="de", beam=1, previous=False)
    assert alone.model.prompts == [[START, DE, TRANSCRIBE]] * 2


def test_at_most_half_of_the_positions_are_previous_text():
    model = listener([said(0.0, "ab" * 10, 1.0, 1.0)])
    model.transcribe(noise(4.0), language="de", beam=1, packs=None)
    assert max(prompt.index(START) for prompt in model.model.prompts) == 1 + 31


def test_a_repetitive_text_is_decoded_again():
    """At each temperature once; what was found at a high one tells the next window nothing."""
    model = listener([said(0.0, "lalalalalalalalalalalalala", 1.0, 1.0), said(0.0, "cd", 2.0)])
    model.transcribe(noise(3.0), language="de", beam=1, belief=None, temperatures=(0.0, 0.4, 0.8), packs=1.5)
    assert model.model.prompts == [[START, DE, TRANSCRIBE]] * 4
    assert model.model.heard == 2, "a window is heard once, however often it is decoded"


def test_an_improbable_text_is_decoded_again():
    doubts = listener([said("hello")], sure=4.0)
    doubts.transcribe(noise(1.0), beam=1, temperatures=(0.0, 0.5), language="de")
    assert len(doubts.model.prompts) == 2
    sure = listener([said("hello")])
    sure.transcribe(noise(1.0), beam=1, temperatures=(0.0, 0.5), language="de")
    assert len(sure.model.prompts) == 1


def test_silence_has_no_text():
    """Unless the model is sure of what it heard."""
    silent = listener([said("hello")], no_speech=0.9, sure=4.0)
    (full,) = silent.transcribe_full([noise(1.0)], beam=1, temperatures=(0.0, 0.5), language="de")
    assert (full.text, full.segments) == ("", []) and "no speech detected" in full.notes[0]
    assert len(silent.model.prompts) == 1, "it is not looked for again"
    assert listener([said("hello")], no_speech=0.9).transcribe(noise(1.0), beam=1) == "hello"
    assert (
        listener([said("hello")], no_speech=0.9, sure=4.0).transcribe(noise(1), beam=1, silence=None, belief=None)
        == "hello"
    )


@pytest.mark.parametrize(
    ("sound", "note"),
    [(torch.zeros(0), "0.000 s of sound: too short"), (torch.zeros(RATE), "silence"), (noise(0.01), "too short")],
)
def test_an_empty_sound_has_no_text_and_a_note(sound, note):
    model = listener([said("hello")])
    (full,) = model.transcribe_full([sound])
    assert full.text == "" and note in full.notes[0] and not model.model.heard


def test_a_batch_of_sounds_gives_what_each_gives_alone():
    scripts = [said(0.0, "ab", 1.0), said(0.0, "cdef", 1.5), said(0.0, "g", 0.5, 0.5, "h", 1.0)]
    sounds = [noise(1.0), noise(1.6), noise(1.9)]
    together = listener(scripts).transcribe_full(sounds, beam=1, timestamps=True)
    for n, found in enumerate(together):
        assert found == listener([scripts[n]]).transcribe_full([sounds[n]], beam=1, timestamps=True)[0]
    seen: list[tuple[float, int]] = []
    listener(scripts).transcribe_full(sounds, beam=1, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (3, 3)


@pytest.mark.parametrize(
    ("sound", "options", "message"),
    [
        (noise(1), {"language": "xx"}, r"unknown language 'xx' \(allowed: en, de"),
        (noise(1), {"task": "sing"}, "task 'sing': expected transcribe, translate"),
        (noise(1), {"beem": 3}, "beem: unknown; did you mean 'beam'"),
        (torch.zeros(100, dtype=torch.int16), {}, "between -1 and 1"),
        (torch.zeros(2, RATE), {}, "mono samples"),
        (torch.full((RATE,), float("nan")), {}, "non-finite samples"),
        ((noise(1), 10), {}, "10 samples per second"),
        ("nowhere.wav", {}, "nowhere.wav: no such sound file"),
    ],
)
def test_invalid_arguments_are_refused(sound, options, message):
    with pytest.raises(UserError, match=message):
        listener([said("hello")]).transcribe(sound, **options)


def test_an_english_only_model_refuses_other_languages():
    model = listener([said("hello")], multilingual=False)
    for options in ({"language": "de"}, {"task": "translate"}):
        with pytest.raises(UserError, match="English-only"):
            model.transcribe(noise(1), **options)
    with pytest.raises(UserError, match="English-only"):
        model.detect([noise(1)])
    assert model.transcribe(noise(1), language="en", beam=1) == "hello"


def test_it_is_scored_by_word_error_rate(tmp_path):
    import wave

    path = tmp_path / "a.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1), file.setsampwidth(2), file.setframerate(RATE)
        file.writeframes((noise(1) * 20000).short().numpy().tobytes())
    judged = listener([said("hello brave world")]).judge(
        [TranscribedSound(path, "Hello, world!", "a.tsv", 1, "sound")], show=1
    )
    assert judged.figures["wer"] == 50.0 and judged.samples[0]["found"] == "hello brave world"


def test_a_folder_without_control_tokens_is_refused_on_use():
    folder = Folder(Script([]), Vocabularies(LETTERS, LETTERS), {"kind": "transcription", "lacks": "no start token"})
    model = Transcriber(folder)
    with pytest.raises(UserError, match="cannot transcribe: no start token"):
        model.transcribe(noise(1))
