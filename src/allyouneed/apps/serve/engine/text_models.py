"""Models that generate text, as the routes use them: a prompt becomes a request of the engine, and tokens become text.

A language model continues its prompt; an encoder-decoder (T5, BART, Marian, translators) reads it as its source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from allyouneed.apps.serve.engine.delivery import Delivery, TokenOutlet
from allyouneed.apps.serve.engine.logits_rules import LogitsRules, TokenRecord, record_of
from allyouneed.apps.serve.errors import ApiError, too_long
from allyouneed.apps.serve.sampling import SamplingFields, new_seed
from allyouneed.apps.translate.translator import Translator, one_line
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.infer.decoding.base import DecodingSpec
from allyouneed.infer.decoding.detokenizer import StopStrings, StreamingDetokenizer, detokenize
from allyouneed.infer.decoding.notes import drop_invalid
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.repetition import has_repeats
from allyouneed.infer.frames import Frame, default_frame
from allyouneed.infer.predictors.base import Predictor, group_by_length
from allyouneed.infer.predictors.generator import Generator, prompt_tokens
from allyouneed.infer.predictors.rewriting.seq2seq import Seq2Seq
from allyouneed.infer.request import Request
from allyouneed.nn.batch import Batch, Rows
from allyouneed.runtime.process import inference

SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat")
KNOWN_OPTIONS = 256  # whose specification is kept
HEAD_ROWS = 256  # positions whose logits are computed at once


class TextModel(ABC):
    """`max_model_len`: the most tokens of prompt and answer; of an encoder-decoder, of the source. `encode` and `spec`
    make the request of the engine and its specification; `sequences` completes them."""

    continues = True  # the answer continues the prompt; otherwise the prompt is a source

    def __init__(self, predictor: Any) -> None:
        self.predictor = predictor

    @cached_property
    def tokenizer(self) -> Tokenizer:
        found: Tokenizer = self.predictor.folder.tokenizers.target
        return found

    @cached_property
    def prompt_tokenizer(self) -> Tokenizer:
        found: Tokenizer = self.predictor.folder.tokenizers.source
        return found

    @property
    @abstractmethod
    def max_model_len(self) -> int: ...

    @abstractmethod
    def encode(self, prompt: str | list[int], fields: SamplingFields, limit: int | None) -> Request:
        """`limit`: the most new tokens; None: the model's default."""

    @abstractmethod
    def spec(self, request: Request, fields: SamplingFields) -> DecodingSpec:
        """How it is decoded. Fields that concern logits are its processor (`LogitsRules`)."""

    def context(self, request: Request) -> Sequence[int]:
        """Tokens before the answer, on which its first characters may depend."""
        return ()

    def is_whole(self, prompt: str | list[int], fields: SamplingFields) -> bool:
        """Whether a prompt is one request of the engine; otherwise `rewrite` splits it into several."""
        return True

    def rewrite(self, prompts: list[str], fields: SamplingFields) -> list[list[str]]:
        """The answers to each prompt, best first. It blocks; call it in a thread."""
        raise NotImplementedError

    def clean(self, text: str) -> str:
        """A finished answer as the predictor returns it."""
        return text

    def answer(self, request: Request, spec: DecodingSpec, tokens: Sequence[int]) -> str:
        """The whole text of an answer."""
        return self.clean(detokenize(self.tokenizer, tokens, self.context(request), spec.decoding.stop))

    def detokenizer(self, request: Request, spec: DecodingSpec) -> StreamingDetokenizer:
        return StreamingDetokenizer(self.tokenizer, self.context(request), spec.decoding.stop)

    def sequences(
        self,
        requests: Sequence[Request],
        specs: Sequence[DecodingSpec],
        draws: int,
        client: str,
        delivery: Delivery,
        queue: Any,
        streams: bool,
    ) -> list[tuple[Request, DecodingSpec]]:
        """What to submit: `draws` sequences of each request, numbered in this order. After every step the queue gets
        (number, tokens) if it `streams`, or (number, a list of `TokenRecord`) if log-probabilities are recorded."""
        found = []
        for prompt, (request, spec) in enumerate(zip(requests, specs, strict=True)):
            decoding, rules = spec.decoding, spec.logits_processor
            if (least := decoding.min_length) > request.limit:
                raise ApiError(f"min_tokens={least} is more than max_tokens={request.limit}", param="min_tokens")
            if isinstance(rules, LogitsRules):
                rules.check(self.vocab)
            limit = request.limit if request.source is None else max(1, request.limit - spec.counted_prompt)
            stop = StopStrings(self.tokenizer, decoding.stop) if decoding.stop else None
            for draw in range(draws):
                number = prompt * draws + draw
                listener = delivery.listener(queue, number) if streams else None
                if isinstance(rules, LogitsRules):
                    rules = copy(rules)
                    spec = replace(spec, logits_processor=rules)
                    if rules.records:
                        listener = rules.listener(TokenOutlet(delivery, queue, number))
                key = prompt, draw
                one = request._replace(limit=limit, sample_key=key, stop=stop, listener=listener, client=client)
                found.append((one, spec))
        return found

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
        with inference():
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
        folder = predictor.folder.decoding
        self.defaults = {name: folder[name] for name in SAMPLING_DEFAULTS if name in folder}
        self._known_spec = lru_cache(KNOWN_OPTIONS)(self._spec)
        self.longest = predictor.limit or predictor.folder.max_tokens

    @property
    def max_model_len(self) -> int:
        return self.longest

    def encode(self, prompt: str | list[int], fields: SamplingFields, limit: int | None) -> Request:
        if isinstance(prompt, str):
            prompt = prompt_tokens(self.tokenizer, prompt, self.predictor.answers)
        else:
            self.check_ids(prompt, self.tokenizer)
        count, most = len(prompt), self.longest
        if count > most:
            raise too_long(count, most, param="prompt")
        if count + (limit or 0) > most:
            raise ApiError(
                f"the prompt has {count} tokens and max_tokens is {limit}, together {count + (limit or 0)}; the "
                f"model allows {most}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return Request(prompt, max(1, most - count) if limit is None else limit, ())

    def context(self, request: Request) -> Sequence[int]:
        return () if self.predictor.answers else request.prompt

    def spec(self, request: Request, fields: SamplingFields) -> DecodingSpec:
        """That of all requests with these fields, up to the seed of those that have none."""
        found = self._known_spec(tuple(fields.decoding(self.defaults, prefers_beam=False).items()))
        if fields.seed is None and found.decoding.method == "sample":
            found = with_seed(found, new_seed())
        rules = LogitsRules.of(fields)
        return found if rules is None else replace(found, logits_processor=rules)

    def _spec(self, changes: tuple[tuple[str, Any], ...]) -> DecodingSpec:
        return self.predictor.engine.runner.spec(Decoding.of({"loops": None} | self.defaults, **dict(changes)))

    @cached_property
    def spec_of(self) -> Callable[[Decoding], DecodingSpec]:
        return lru_cache(KNOWN_OPTIONS)(self.predictor.engine.runner.spec)


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

    def frame(self, prompt: str | list[int], fields: SamplingFields) -> Frame:
        if fields.target_lang or fields.source_lang:
            raise ApiError("this model has no languages to choose from; remove source_lang and target_lang")
        return default_frame(self.predictor.folder.tokenizers)

    def encode(self, prompt: str | list[int], fields: SamplingFields, limit: int | None) -> Request:
        frame, tokenizer = self.frame(prompt, fields), self.prompt_tokenizer
        if isinstance(prompt, str):
            prompt = frame.source(tokenizer.encode(prompt))
        else:
            self.check_ids(prompt, tokenizer)
        if len(prompt) > self.max_model_len:
            raise too_long(len(prompt), self.max_model_len, param="prompt")
        if limit is None:
            limit = self._decoding(fields).limit(len(prompt))
        return Request(frame.begin, limit, (), prompt)

    def spec(self, request: Request, fields: SamplingFields) -> DecodingSpec:
        found, forced = self._decoding(fields), max(0, len(request.prompt) - len(self.tokenizer.opening))
        assert request.source is not None
        if found.loops is not None and has_repeats(request.source, found.loops):
            found = found.model_copy(update={"loops": None})  # its target may repeat as well
        if fields.seed is None and found.method == "sample":
            found = found.model_copy(update={"seed": new_seed()})
        spec, rules = self.predictor.engine.runner.spec(found, counted=forced), LogitsRules.of(fields)
        return spec if rules is None else replace(spec, logits_processor=rules)

    def _decoding(self, fields: SamplingFields) -> Decoding:
        folder = self.predictor.folder.decoding
        return Decoding.of(folder, **fields.decoding(folder, prefers_beam=True))


class TranslationModel(SourceModel):
    """Translates a prompt that the translator takes as a whole; others go through `Translator.translate_full`, which
    splits and joins them."""

    predictor: Translator

    @property
    def max_model_len(self) -> int:
        return self.predictor.max_tokens

    def frame(self, prompt: str | list[int], fields: SamplingFields) -> Frame:
        languages = fields.target_lang, fields.source_lang
        if not isinstance(prompt, str) and self.predictor.writes_whole_targets:
            task = self.predictor.folder.task["kind"]
            raise ApiError(f"prompt: {task} writes whole targets: send text", param="prompt")
        found = self.predictor.direct_frame(prompt, *languages) if isinstance(prompt, str) else None
        return self.predictor.frame(*languages) if found is None else found

    def is_whole(self, prompt: str | list[int], fields: SamplingFields) -> bool:
        if not isinstance(prompt, str):
            return True
        return self.predictor.direct_frame(prompt, fields.target_lang, fields.source_lang) is not None

    def clean(self, text: str) -> str:
        return drop_invalid(one_line(text))

    def rewrite(self, prompts: list[str], fields: SamplingFields) -> list[list[str]]:
        changes = fields.decoding(self.predictor.folder.decoding, prefers_beam=True)
        changes |= {"best": fields.n} if (fields.n or 1) > 1 else {}
        changes |= {"max_length": fields.limit} if fields.limit is not None else {}
        changes |= {"seed": new_seed()} if "seed" in changes and fields.seed is None else {}
        found = self.predictor.translate_full(prompts, fields.target_lang, from_=fields.source_lang, **changes)
        return [[candidate.text for candidate in one.candidates] for one in found]


def with_seed(spec: DecodingSpec, seed: int) -> DecodingSpec:
    return replace(spec, decoding=spec.decoding.model_copy(update={"seed": seed}))


def text_model(predictor: Predictor) -> TextModel | None:
    """None for a model that generates no text."""
    match predictor:
        case Generator():
            return LanguageModel(predictor)
        case Translator():
            return TranslationModel(predictor)
        case Seq2Seq():
            writer = predictor.writer
            return SourceModel(predictor) if writer is None else LanguageModel(writer)
    return None
