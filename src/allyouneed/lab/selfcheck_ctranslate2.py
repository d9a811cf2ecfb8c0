"""Compare a model of ours with its CTranslate2 export on the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from allyouneed.data.media.sound import HOP, RATE
from allyouneed.data.media.speech import Speech
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.forward import NamedForward
from allyouneed.interop.tokenizers.subword_files import read_token_list
from allyouneed.lab.selfcheck import LENGTHS, STEPS, TOLERANCE, Check, _free_memory, count_weights, load_wide
from allyouneed.nn.batch import Signal

Rows = list[list[int]]


def against_ctranslate2(ours: Path, theirs: Path) -> Check:
    """Compare a folder of ours with a CTranslate2 folder of the same model; pair run in float32."""
    check = Check()
    size = 2 * 4 * count_weights(ours)
    if size > (free := _free_memory()):
        check.lines.append(f"not compared: that needs {size / 1e9:.1f} GB of memory; {free / 1e9:.1f} GB are free")
        return check
    try:
        folder = load_wide(ours)
        pair = (_SpeechPair if folder.task["kind"] == "transcription" else _TextPair)(folder, theirs)
    except (RuntimeError, ValueError) as error:
        check.add(f"CTranslate2 cannot load {theirs} ({error})", False)
        return check
    gap = pair.difference()
    check.add(f"largest difference of {pair.what} {gap:.1e} (allowed {TOLERANCE:.0e})", gap <= TOLERANCE)
    if pair.generates:
        same, total = pair.count_equal_texts()
        check.add(f"generated tokens the same {same} of {total} times", same == total)
    return check


class _TextPair:
    """Our model and theirs on random texts of unequal lengths without special tokens."""

    def __init__(self, folder: Folder, theirs: Path) -> None:
        import ctranslate2

        config: Any = folder.model.config
        self.folder, self.config, self.kind = folder, config, config.kind
        self.vocabs = folder.tokenizers
        made = {"encoder-decoder": "Translator", "decoder": "Generator", "encoder": "Encoder"}[self.kind]
        self.theirs: Any = getattr(ctranslate2, made)(str(theirs), intra_threads=1, compute_type="float32")
        self.source, self.target = (ids_to_tokens(theirs, side) for side in ("source", "target"))
        self.start = self.vocabs.target.opening[0] if self.vocabs.target.opening else self.vocabs.target.bos
        self.called = NamedForward(folder.model, self.vocabs.source.pad)
        self.generates = self.kind != "encoder"
        self.what = "log-probabilities" if self.generates else "hidden states"

    def random_texts(self, seed: int, share: int = 1) -> Rows:
        """Token rows of at most 1/`share` of the model's limit."""
        sizes, vocabs, generator = self.config.vocabs, self.vocabs, torch.Generator().manual_seed(seed)
        special = {*vocabs.source.specials, *vocabs.target.specials}
        known = [n for n in range(min(sizes.source, sizes.target)) if n not in special]
        most = max(LENGTHS) if self.config.limit is None else max(1, self.config.limit // share - 1)
        picks = [
            torch.randint(len(known), (min(length + 1, most),), generator=generator).tolist() for length in LENGTHS
        ]
        return [[known[pick] for pick in row] for row in picks]

    @torch.no_grad()
    def difference(self) -> float:
        """The largest difference, relative to the largest score where that exceeds one."""
        rows = self.random_texts(0)
        if self.kind == "encoder":
            return self._hidden(rows)
        targets = self.random_texts(1) if self.kind == "encoder-decoder" else rows
        if self.kind == "encoder-decoder":
            given = [[self.start, *row] for row in targets]
            logits = self.called.logits({"tokens": rows, "targets": given})
            scored = self.theirs.score_batch(self.source(rows), self.target(targets))
            labels = [[*row, self.vocabs.target.eos] for row in targets]
        else:
            logits = self.called.logits({"tokens": rows})
            scored = self.theirs.score_batch(self.target(rows))
            labels = [row[1:] for row in rows]
        gap = 0.0
        for row, expected, found in zip(labels, logits.log_softmax(-1), scored, strict=True):
            ours = expected[range(len(row)), row]
            gap = max([gap, *(ours - torch.tensor(found.log_probs)).abs().tolist()])
        return gap / max(1.0, float(logits.abs().max()))

    def _hidden(self, rows: Rows) -> float:
        expected = self.called.hidden({"tokens": rows})
        found = torch.as_tensor(_to_array(self.theirs.forward_batch(self.target(rows)).last_hidden_state))
        pairs = zip(rows, expected, found, strict=True)
        return max(float((ours[: len(row)] - other[: len(row)]).abs().max()) for row, ours, other in pairs)

    @torch.no_grad()
    def count_equal_texts(self) -> tuple[int, int]:
        """(equal, total) greedy texts."""
        rows, vocabs = self.random_texts(2, share=2), self.vocabs
        steps = min(STEPS, max(1, (self.config.limit or 2 * STEPS) // 2 - 1))
        engine = Engine(self.folder.model, self.start, vocabs.target.eos, vocabs.source.pad)
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


class _SpeechPair:
    """Our Whisper and theirs on noise."""

    what, generates = "hidden states", True

    def __init__(self, folder: Folder, theirs: Path) -> None:
        import ctranslate2

        config: Any = folder.model.config
        self.model: Any = folder.model
        self.theirs: Any = ctranslate2.models.Whisper(str(theirs), intra_threads=1, compute_type="float32")
        speech = Speech.model_validate({key: value for key, value in folder.task.items() if key != "kind"})
        selected = [*list(speech.languages.values())[:1], *list(speech.tasks.values())[:1]]
        self.prompt, self.end = [speech.start, *selected, speech.no_timestamps], speech.end
        self.steps = max(len(self.prompt), min(STEPS, (config.limit or 2 * STEPS) // 2))
        shape = len(LENGTHS), config.source_embed.mels, round(speech.seconds * RATE / HOP)
        self.frames = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        self.given = ctranslate2.StorageView.from_array(self.frames.numpy())

    @torch.no_grad()
    def difference(self) -> float:
        found = torch.as_tensor(_to_array(self.theirs.encode(self.given)))
        return float((self.model.encode(Signal(self.frames)).hidden - found).abs().max())

    @torch.no_grad()
    def count_equal_texts(self) -> tuple[int, int]:
        """(equal, total) greedy texts without banned tokens; CTranslate2 generates at most half of `max_length`."""
        options = {"beam_size": 1, "max_length": 2 * self.steps, "suppress_blank": False, "suppress_tokens": []}
        found = self.theirs.generate(self.given, [self.prompt] * len(self.frames), **options)
        called, same = NamedForward(self.model), 0
        for sound, result in zip(self.frames, found, strict=True):
            tokens: list[int] = []
            while len(tokens) < self.steps:
                scores = called.logits({"features": sound[None], "targets": [[*self.prompt, *tokens]]})
                if (token := int(scores[0, -1].argmax())) == self.end:
                    break
                tokens.append(token)
            same += tokens == result.sequences_ids[0]
        return same, len(found)


def ids_to_tokens(path: Path, side: str) -> Any:
    """A map from token ids to the tokens in the vocabulary file."""
    files = [f"{name}vocabulary{end}" for name in (f"{side}_", "shared_", "") for end in (".json", ".txt")]
    names = read_token_list(path, next(file for file in files if (path / file).is_file()))
    return lambda rows: [[names[number] for number in row] for row in rows]


def _to_array(view: Any) -> Any:
    import numpy

    return numpy.array(view)
