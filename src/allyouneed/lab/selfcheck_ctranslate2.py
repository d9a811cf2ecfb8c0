"""The same tokens through a model of ours and through what was written of it for CTranslate2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from allyouneed.data.media.sound import HOP, RATE
from allyouneed.data.media.speech import Speech
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.forward import Called
from allyouneed.interop.load import load
from allyouneed.lab.selfcheck import LENGTHS, STEPS, TOLERANCE, Check, _memory
from allyouneed.nn.batch import Signal

Rows = list[list[int]]


def against_ctranslate2(ours: Path, theirs: Path) -> Check:
    """A folder of ours and one of theirs that ought to hold the same model; both compute in float32."""
    check = Check()
    size = 2 * 4 * sum(parameter.numel() for parameter in load(ours).model.parameters())
    if size > (room := _memory()):
        check.lines.append(f"not compared: that takes {size / 1e9:.1f} GB of memory, and {room / 1e9:.1f} are free")
        return check
    try:
        folder = load(ours, dtype="float32")
        both = (_Sounds if folder.task["kind"] == "transcription" else _Texts)(folder, theirs)
    except (RuntimeError, ValueError) as error:
        check.add(f"CTranslate2 cannot load {theirs} ({error})", False)
        return check
    apart = both.difference()
    check.add(f"largest difference of {both.what} {apart:.1e} (allowed {TOLERANCE:.0e})", apart <= TOLERANCE)
    if both.writes:
        same, total = both.generated()
        check.add(f"generated tokens the same {same} of {total} times", same == total)
    return check


class _Texts:
    """Our model and theirs, asked the same; texts are random, of unequal lengths, without special tokens."""

    def __init__(self, folder: Folder, theirs: Path) -> None:
        import ctranslate2

        config: Any = folder.model.config
        self.folder, self.config, self.kind = folder, config, config.kind
        self.words = folder.tokenizers
        made = {"encoder-decoder": "Translator", "decoder": "Generator", "encoder": "Encoder"}[self.kind]
        self.theirs: Any = getattr(ctranslate2, made)(str(theirs), intra_threads=1, compute_type="float32")
        self.source, self.target = (_vocabulary(theirs, side) for side in ("source", "target"))
        self.start = self.words.target.opening[0] if self.words.target.opening else self.words.target.bos
        self.called = Called(folder.model, self.words.source.pad)
        self.writes = self.kind != "encoder"
        self.what = "log-probabilities" if self.writes else "hidden states"

    def sentences(self, seed: int, share: int = 1) -> Rows:
        """`share`: only that part of the places there are is used."""
        sizes, words, dice = self.config.vocabs, self.words, torch.Generator().manual_seed(seed)
        special = {*words.source.specials, *words.target.specials}
        known = [n for n in range(min(sizes.source, sizes.target)) if n not in special]
        most = max(LENGTHS) if self.config.limit is None else max(1, self.config.limit // share - 1)
        picks = [torch.randint(len(known), (min(length + 1, most),), generator=dice).tolist() for length in LENGTHS]
        return [[known[pick] for pick in row] for row in picks]

    @torch.no_grad()
    def difference(self) -> float:
        """The largest, relative to the largest score where that is above one."""
        rows = self.sentences(0)
        if self.kind == "encoder":
            return self._hidden(rows)
        targets = self.sentences(1) if self.kind == "encoder-decoder" else rows
        if self.kind == "encoder-decoder":
            given = [[self.start, *row] for row in targets]
            logits = self.called.logits({"tokens": rows, "targets": given})
            scored = self.theirs.score_batch(self.source(rows), self.target(targets))
            said = [[*row, self.words.target.eos] for row in targets]
        else:
            logits = self.called.logits({"tokens": rows})
            scored = self.theirs.score_batch(self.target(rows))
            said = [row[1:] for row in rows]
        apart = 0.0
        for row, expected, found in zip(said, logits.log_softmax(-1), scored, strict=True):
            ours = expected[range(len(row)), row]
            apart = max([apart, *(ours - torch.tensor(found.log_probs)).abs().tolist()])
        return apart / max(1.0, float(logits.abs().max()))

    def _hidden(self, rows: Rows) -> float:
        expected = self.called.hidden({"tokens": rows})
        found = torch.as_tensor(_numbers(self.theirs.forward_batch(self.target(rows)).last_hidden_state))
        pairs = zip(rows, expected, found, strict=True)
        return max(float((ours[: len(row)] - other[: len(row)]).abs().max()) for row, ours, other in pairs)

    @torch.no_grad()
    def generated(self) -> tuple[int, int]:
        """How many of the texts that both write, always with the likeliest token, are the same."""
        rows, words = self.sentences(2, share=2), self.words
        steps = min(STEPS, max(1, (self.config.limit or 2 * STEPS) // 2 - 1))
        engine = Engine(self.folder.model, self.start, words.target.eos, words.source.pad)
        decoding = Decoding(method="greedy", max_length=steps, extra=steps, loops=None)
        if self.kind == "encoder-decoder":
            answers = engine.generate(rows, decoding)
            options = {"beam_size": 1, "max_decoding_length": steps, "min_decoding_length": 0}
            found = self.theirs.translate_batch(self.source(rows), **options)
            theirs = [result.hypotheses[0] for result in found]
        else:
            answers = engine.complete(rows, decoding)
            options = {"max_length": steps, "sampling_topk": 1, "include_prompt_in_result": False}
            theirs = [result.sequences[0] for result in self.theirs.generate_batch(self.target(rows), **options)]
        ours = self.target([list(answer[0].tokens) for answer in answers])
        return sum(one == other for one, other in zip(ours, theirs, strict=True)), len(rows)


class _Sounds:
    """Our Whisper and theirs, asked the same; sounds are noise."""

    what, writes = "hidden states", True

    def __init__(self, folder: Folder, theirs: Path) -> None:
        import ctranslate2

        config: Any = folder.model.config
        self.model: Any = folder.model
        self.theirs: Any = ctranslate2.models.Whisper(str(theirs), intra_threads=1, compute_type="float32")
        speech = Speech.model_validate({key: value for key, value in folder.task.items() if key != "kind"})
        told = [*list(speech.languages.values())[:1], *list(speech.tasks.values())[:1]]
        self.prompt, self.end = [speech.start, *told, speech.no_timestamps], speech.end
        self.steps = max(len(self.prompt), min(STEPS, (config.limit or 2 * STEPS) // 2))
        shape = len(LENGTHS), config.source_embed.mels, round(speech.seconds * RATE / HOP)
        self.frames = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.given = ctranslate2.StorageView.from_array(self.frames.numpy())

    @torch.no_grad()
    def difference(self) -> float:
        found = torch.as_tensor(_numbers(self.theirs.encode(self.given)))
        return float((self.model.encode(Signal(self.frames)).hidden - found).abs().max())

    @torch.no_grad()
    def generated(self) -> tuple[int, int]:
        """How many of the texts that both write are the same, whatever may not be said; they say at most half of what
        they are told."""
        options = {"beam_size": 1, "max_length": 2 * self.steps, "suppress_blank": False, "suppress_tokens": []}
        found = self.theirs.generate(self.given, [self.prompt] * len(self.frames), **options)
        called, same = Called(self.model), 0
        for sound, result in zip(self.frames, found, strict=True):
            said: list[int] = []
            while len(said) < self.steps:
                scores = called.logits({"features": sound[None], "targets": [[*self.prompt, *said]]})
                if (token := int(scores[0, -1].argmax())) == self.end:
                    break
                said.append(token)
            same += said == result.sequences_ids[0]
        return same, len(found)


def _vocabulary(path: Path, side: str) -> Any:
    """Numbers to the names that its files give them."""
    places = [path / f"{name}vocabulary.json" for name in (f"{side}_", "shared_", "")]
    file = next(place for place in places if place.is_file())
    names = json.loads(file.read_text(encoding="utf-8"))
    return lambda rows: [[names[number] for number in row] for row in rows]


def _numbers(view: Any) -> Any:
    import numpy

    return numpy.array(view)
