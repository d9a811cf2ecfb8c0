"""Models that generate text, as the routes use them: a prompt becomes a request of the engine, and tokens become text.

A language model continues its prompt; an encoder-decoder (T5, BART, Marian, translators) reads it as its source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from allyouneed.apps.serve.engine.delivery import TokenOutlet
from allyouneed.apps.serve.engine.logits_rules import LogitsRules, TokenRecord, record_of
from allyouneed.apps.serve.engine.loop import EngineLoop, NewSequence
from allyouneed.apps.serve.errors import ApiError, too_long
from allyouneed.apps.serve.sampling import GenerationOptions, new_seed
from allyouneed.apps.translate.translator import Translator, one_line
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.infer.decoding.base import DecodingSpec
from allyouneed.infer.decoding.detokenizer import StopStrings, StreamingDetokenizer
from allyouneed.infer.decoding.notes import drop_invalid
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.repetition import has_repeats
from allyouneed.infer.frames import Frame, default_frame
from allyouneed.infer.predictors.base import Predictor, group_by_length
from allyouneed.infer.predictors.generator import Generator
from allyouneed.infer.predictors.seq2seq import Seq2Seq
from allyouneed.infer.request import Medium, Request
from allyouneed.nn.batch import Batch, Rows

SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat")
KNOWN_OPTIONS = 256  # whose specification is kept
HEAD_ROWS = 256  # positions whose logits are computed at once


@dataclass(frozen=True)
class EncodedPrompt:
    """`prompt`: first tokens of the target. `source`: of an encoder. `shown`: the tokens of the prompt as the client
    knows it, for `echo` and usage. `text`: None if the client sent token ids. `frame`: of an encoder-decoder."""

    prompt: list[int]
    shown: list[int]
    source: list[int] | None = None
    text: str | None = None
    frame: Frame | None = None
    media: tuple[Medium, ...] = ()  # images and sounds in the prompt


class TextModel(ABC):
    """`max_model_len`: the most tokens of prompt and answer; of an encoder-decoder, of the source."""

    continues = True  # the answer continues the prompt; otherwise the prompt is a source

    def __init__(self, predictor: Any) -> None:
        self.predictor = predictor

    @property
    def tokenizer(self) -> Tokenizer:
        found: Tokenizer = self.predictor.folder.tokenizers.target
        return found

    @property
    def prompt_tokenizer(self) -> Tokenizer:
        found: Tokenizer = self.predictor.folder.tokenizers.source
        return found

    @property
    @abstractmethod
    def max_model_len(self) -> int: ...

    @abstractmethod
    def encode(self, prompt: str | list[int], options: GenerationOptions, specials: bool = False) -> EncodedPrompt:
        """`specials`: parse special tokens in the text."""

    @abstractmethod
    def spec(self, prompt: EncodedPrompt, options: GenerationOptions) -> tuple[DecodingSpec, int]:
        """How it is decoded, and the most new tokens."""

    def context(self, prompt: EncodedPrompt) -> list[int]:
        """Tokens before the answer, on which its first characters may depend."""
        return []

    def is_whole(self, prompt: str | list[int], options: GenerationOptions) -> bool:
        """Whether a prompt is one request of the engine; otherwise `rewrite` splits it into several."""
        return True

    def rewrite(self, prompts: list[str], options: GenerationOptions) -> list[list[str]]:
        """The answers to each prompt, best first. It blocks; call it in a thread."""
        raise NotImplementedError

    def clean(self, text: str) -> str:
        """A finished answer as the predictor returns it."""
        return text

    def detokenizer(self, prompt: EncodedPrompt, options: GenerationOptions) -> StreamingDetokenizer:
        return StreamingDetokenizer(self.tokenizer, self.context(prompt), options.stop)

    def sequence(
        self,
        loop: EngineLoop,
        prompt: EncodedPrompt,
        options: GenerationOptions,
        queue: Any,
        client: str,
        number: int,
        key: tuple[int, ...],
        streams: bool,
    ) -> NewSequence:
        """What to submit for one answer. After every step the queue gets (`number`, tokens) if it `streams`, (`number`,
        a list of `TokenRecord`) if log-probabilities are recorded, and (`number`, None) at the end. `key`: decides
        samples, with the seed."""
        delivery, (spec, limit) = loop.delivery, self.spec(prompt, options)
        rules = self._rules(options)
        if rules is not None:
            spec = replace(spec, logits_processor=rules)
        listener = delivery.listener(queue, number) if streams else None
        if rules is not None and options.logprobs is not None:
            outlet, record = TokenOutlet(delivery, queue, number), rules.record
            listener = lambda token: outlet(record(token))  # noqa: E731

        return NewSequence(
            Request(
                prompt.prompt,
                limit,
                key,
                prompt.source,
                StopStrings(self.tokenizer, options.stop) if options.stop else None,
                listener,
                client=client,
                media=prompt.media,
            ),
            spec,
            lambda _: delivery.post(queue, (number, None)),
        )

    def _rules(self, options: GenerationOptions) -> LogitsRules | None:
        if unknown := [token for token in options.logit_bias if token >= self.vocab]:
            raise ApiError(
                f"logit_bias: token {unknown[0]} is outside the vocabulary of {self.vocab}", param="logit_bias"
            )
        presence, frequency, top = options.presence_penalty, options.frequency_penalty, options.logprobs
        if not options.logit_bias and not presence and not frequency and top is None:
            return None
        return LogitsRules(options.logit_bias, presence, frequency, top)

    @cached_property
    def vocab(self) -> int:
        sizes = self.predictor.model.config.vocabs
        return self.tokenizer.size if sizes is None else int(sizes.target)

    def check_ids(self, ids: Sequence[int], tokenizer: Tokenizer) -> None:
        if not ids:
            raise ApiError("the prompt has no tokens", param="prompt")
        if (largest := max(ids)) >= tokenizer.size:
            raise ApiError(f"token {largest} is outside the vocabulary of {tokenizer.size} tokens", param="prompt")

    def prompt_records(self, prompts: Sequence[Sequence[int]], top: int) -> list[list[TokenRecord]]:
        """The log-probability of each prompt token given those before it; the first has none."""
        model, found = self.predictor.model, {}
        with torch.inference_mode():
            for batch in group_by_length([len(ids) for ids in prompts]):
                rows = Rows.of([prompts[n] for n in batch], self.tokenizer.pad).to(self.predictor.device)
                hidden = model(Batch(rows))  # (batch, time, width)
                for row, number in enumerate(batch):
                    found[number] = self._records(hidden[row], prompts[number], top)
        return [found[number] for number in range(len(prompts))]

    def _records(self, hidden: torch.Tensor, ids: Sequence[int], top: int) -> list[TokenRecord]:
        records = [TokenRecord(ids[0])]
        for begin in range(0, len(ids) - 1, HEAD_ROWS):
            end = min(begin + HEAD_ROWS, len(ids) - 1)
            log_probs = self.predictor.model.head(hidden[begin:end]).float().log_softmax(-1)
            records += [record_of(log_probs[n - begin], ids[n + 1], top) for n in range(begin, end)]
        return records


class LanguageModel(TextModel):
    """Continues prompts. By default it samples at temperature 1, with the folder's top-k and the like."""

    predictor: Generator

    def __init__(self, predictor: Generator) -> None:
        super().__init__(predictor)
        predictor.retrieve_as_trained()
        self._known_spec = lru_cache(KNOWN_OPTIONS)(self._seedless_spec)

    @property
    def max_model_len(self) -> int:
        return self.predictor.limit or self.predictor.folder.max_tokens

    def encode(self, prompt: str | list[int], options: GenerationOptions, specials: bool = False) -> EncodedPrompt:
        tokenizer = self.tokenizer
        if isinstance(prompt, str):
            start = () if specials else tokenizer.opening
            ids = [*start, *tokenizer.encode(prompt, specials)]
            ids += [tokenizer.eos] if self.predictor.answers else []
            ids = ids or [tokenizer.eos]  # without a begin token, a text starts after the end of another (GPT-2)
        else:
            self.check_ids(prompt, tokenizer)
            ids = prompt
        needed = len(ids) + (options.max_tokens or 0)
        if len(ids) > self.max_model_len:
            raise too_long(len(ids), self.max_model_len, param="prompt")
        if needed > self.max_model_len:
            raise ApiError(
                f"the prompt has {len(ids)} tokens and max_tokens is {options.max_tokens}, together {needed}; the "
                f"model allows {self.max_model_len}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return EncodedPrompt(ids, ids, text=prompt if isinstance(prompt, str) else None)

    def context(self, prompt: EncodedPrompt) -> list[int]:
        return [] if self.predictor.answers else prompt.prompt

    def spec(self, prompt: EncodedPrompt, options: GenerationOptions) -> tuple[DecodingSpec, int]:
        room = self.max_model_len - len(prompt.prompt)
        limit = max(1, room) if options.max_tokens is None else options.max_tokens
        found = self._known_spec(options)
        if options.seed is None and found.decoding.method == "sample":
            found = replace(found, decoding=found.decoding.model_copy(update={"seed": new_seed()}))
        _checked(found.decoding, limit)
        return found, limit

    def _seedless_spec(self, options: GenerationOptions) -> DecodingSpec:
        """Of all requests with these options, up to the seed of those that have none."""
        folder = self.predictor.folder.decoding
        defaults = {name: folder[name] for name in SAMPLING_DEFAULTS if name in folder}
        options = replace(options, seed=options.seed or 0)
        found = Decoding.of({"loops": None} | defaults, **options.decoding(defaults, prefers_beam=False))
        return self.predictor.engine.spec(found)


class SourceModel(TextModel):
    """Reads a prompt as its source and is decoded as its folder says, mostly by beam search, unless the request asks
    for sampling."""

    continues = False

    @property
    def max_model_len(self) -> int:
        config = self.predictor.model.config
        limit: int | None = getattr(config, "source_limit", config.limit)
        return limit or int(self.predictor.folder.max_tokens)

    def clean(self, text: str) -> str:
        return drop_invalid(text)

    def frame(self, prompt: str | list[int], options: GenerationOptions) -> Frame:
        if options.target_lang or options.source_lang:
            raise ApiError("this model has no languages to choose from; remove source_lang and target_lang")
        return default_frame(self.predictor.folder.tokenizers)

    def encode(self, prompt: str | list[int], options: GenerationOptions, specials: bool = False) -> EncodedPrompt:
        frame, tokenizer = self.frame(prompt, options), self.prompt_tokenizer
        if isinstance(prompt, str):
            ids = frame.source(tokenizer.encode(prompt, specials))
        else:
            self.check_ids(prompt, tokenizer)
            ids = prompt
        if len(ids) > self.max_model_len:
            raise too_long(len(ids), self.max_model_len, param="prompt")
        return EncodedPrompt(frame.begin, ids, ids, prompt if isinstance(prompt, str) else None, frame)

    def spec(self, prompt: EncodedPrompt, options: GenerationOptions) -> tuple[DecodingSpec, int]:
        assert prompt.source is not None and prompt.frame is not None
        folder, forced = self.predictor.folder.decoding, len(prompt.frame.forced)
        found = Decoding.of(folder, **options.decoding(folder, prefers_beam=True))
        if found.loops is not None and has_repeats(prompt.source, found.loops):
            found = found.model_copy(update={"loops": None})  # its target may repeat as well
        limit = found.limit(len(prompt.source)) if options.max_tokens is None else options.max_tokens
        return self.predictor.engine.spec(_checked(found, limit), counted=forced), max(1, limit - forced)


class TranslationModel(SourceModel):
    """Translates a prompt that the translator takes as a whole; others go through `Translator.translate_full`, which
    splits and joins them."""

    predictor: Translator

    @property
    def max_model_len(self) -> int:
        return self.predictor.max_tokens

    def frame(self, prompt: str | list[int], options: GenerationOptions) -> Frame:
        languages = options.target_lang, options.source_lang
        if not isinstance(prompt, str) and self.predictor.writes_whole_targets:
            task = self.predictor.folder.task["kind"]
            raise ApiError(f"prompt: {task} writes whole targets: send text", param="prompt")
        found = self.predictor.direct_frame(prompt, *languages) if isinstance(prompt, str) else None
        return self.predictor.frame(*languages) if found is None else found

    def is_whole(self, prompt: str | list[int], options: GenerationOptions) -> bool:
        if not isinstance(prompt, str):
            return True
        return self.predictor.direct_frame(prompt, options.target_lang, options.source_lang) is not None

    def clean(self, text: str) -> str:
        return drop_invalid(one_line(text))

    def rewrite(self, prompts: list[str], options: GenerationOptions) -> list[list[str]]:
        changes = options.decoding(self.predictor.folder.decoding, prefers_beam=True)
        changes |= {"best": options.n} if options.n > 1 else {}
        changes |= {"max_length": options.max_tokens} if options.max_tokens is not None else {}
        found = self.predictor.translate_full(prompts, options.target_lang, from_=options.source_lang, **changes)
        return [[candidate.text for candidate in one.candidates] for one in found]


def _checked(decoding: Decoding, limit: int) -> Decoding:
    if decoding.min_length > limit:
        raise ApiError(f"min_tokens={decoding.min_length} is more than max_tokens={limit}", param="min_tokens")
    return decoding


def text_model(predictor: Predictor) -> TextModel | None:
    """None for a model that generates no text."""
    match predictor:
        case Generator():
            return LanguageModel(predictor)
        case Translator():
            return TranslationModel(predictor)
        case Seq2Seq():
            return SourceModel(predictor)
    return None
