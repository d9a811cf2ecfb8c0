"""Text generation from prompts with images and sounds in them (KOSMOS-1)."""

from __future__ import annotations

from collections.abc import Generator as Coroutine
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, overload

import torch

from allyouneed.config import parse
from allyouneed.data.batches.interleaved import encode_pieces
from allyouneed.data.files.interleaved import InterleavedText
from allyouneed.data.media.pieces import MediaInputs, MediaPiece, fill_placeholders, parse_pieces, pieces_text
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import EvaluationResult, evenly_spaced
from allyouneed.infer.predictors.generator import EncodedPrompt, Generation, Generator
from allyouneed.infer.request import Medium
from allyouneed.metrics.answers import accuracy
from allyouneed.tasks.language.interleaved import InterleavedLM

PieceLike = str | Mapping[str, Any]  # a text, {"image": …} or {"audio": …}
Prompt = str | Sequence[PieceLike]


class InterleavedGenerator(Generator):
    """Continues prompts with images and sounds in them. A prompt is a text, or a list of pieces: texts,
    `{"image": …}` (a path, a PIL image, or pixels) and `{"audio": …}` (a path, samples at 16 kHz, or (samples,
    rate))."""

    @cached_property
    def inputs(self) -> MediaInputs:
        """How the model reads images and sounds."""
        task: InterleavedLM = parse(InterleavedLM, self.folder.task, f"{self.folder.path}: task")
        return task.media

    @overload
    def generate(self, prompts: str, **options: Any) -> str: ...

    @overload
    def generate(self, prompts: Sequence[Prompt], **options: Any) -> list[str]: ...

    def generate(self, prompts: str | Sequence[Prompt], **options: Any) -> str | list[str]:
        """The continuation of a text, or of each prompt of a list. `options`: see `generate_full`; `images=["a.png"]`,
        `max_length=20`, …"""
        many = [prompts] if isinstance(prompts, str) else prompts
        found = [full.text for full in self.generate_full(many, **options)]
        return found[0] if isinstance(prompts, str) else found

    def generate_full(
        self,
        prompts: Sequence[Prompt],
        *,
        images: Sequence[Any] = (),
        audio: Sequence[Any] = (),
        specials: bool = False,
        **options: Any,
    ) -> list[Generation]:
        """`Generator.generate_full` with media. `images`, `audio`: for the placeholders `<image>` and `<audio>` of each
        prompt that is a text, in order; where it has none, they come first."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise UserError("generate_full takes a list of prompts; use [prompt] for a single one")
        call = self.call_options(**options)
        return self._complete([self.read_prompt(prompt, images, audio, specials) for prompt in prompts], call)

    def stream(
        self,
        prompt: Prompt,
        *,
        images: Sequence[Any] = (),
        audio: Sequence[Any] = (),
        specials: bool = False,
        **options: Any,
    ) -> Coroutine[str, None, Generation]:
        """`Generator.stream` with media; `images`, `audio`: see `generate_full`."""
        call = self._stream_options(options)
        return self._stream(self.read_prompt(prompt, images, audio, specials), call)

    def read_prompt(
        self, prompt: Prompt, images: Sequence[Any] = (), audio: Sequence[Any] = (), specials: bool = False
    ) -> EncodedPrompt:
        """Tokens and media of a prompt; images and sounds are read."""
        pieces = self._pieces(prompt, images, audio)
        tokens, _, media = encode_pieces(self.tokenizer, pieces, self.inputs, specials)
        begin = [*self.tokenizer.opening]
        text = pieces_text(pieces)
        self._check_length(text, [*begin, *tokens])
        read = tuple(
            Medium(piece.kind, len(begin) + at, self.inputs[piece.kind].slots, self._read(piece)) for piece, at in media
        )
        return EncodedPrompt(text, [*begin, *tokens], read)

    def _pieces(self, prompt: Prompt, images: Sequence[Any], audio: Sequence[Any]) -> tuple[MediaPiece, ...]:
        for name, given in (("images", images), ("audio", audio)):
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise UserError(f"{name} takes a list; use [{name.removesuffix('s')}] for a single one")
        if not images and not audio:
            return parse_pieces(prompt)
        if not isinstance(prompt, str):
            raise UserError("images and audio are for prompts that are texts; give them as pieces of the prompt")
        return fill_placeholders(prompt, {"image": images, "audio": audio})

    def _read(self, piece: MediaPiece) -> torch.Tensor:
        return self.inputs[piece.kind].read(piece.value)

    def judge(
        self, examples: Sequence[InterleavedText], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """The share of answers that are exactly those of the examples; texts without an answer are not predicted."""
        asked = [example for example in examples if example.answer is not None]
        prompts = [[{piece.kind: piece.value} for piece in example.pieces] for example in asked]
        found = self.generate(prompts, decoding=decoding) if prompts else []
        expected = [str(example.answer).strip() for example in asked]
        given = [text.strip() for text in found]
        figures, text = dict[str, float](), ""
        if asked:
            figures = {"accuracy": accuracy(given, expected)}
            text = f"accuracy {figures['accuracy']:5.1f} %  of {len(asked)} answers"
        samples = [
            {"prompt": example.prompt, "expected": wanted, "found": answer}
            for example, wanted, answer in evenly_spaced(list(zip(asked, expected, given, strict=True)), show)
        ]
        return EvaluationResult(figures, text, samples)
