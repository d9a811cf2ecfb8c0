"""Text generation: continuations of prompts."""

from __future__ import annotations

from collections.abc import Generator as Coroutine
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

from allyouneed.data.batches.packing import Items
from allyouneed.data.files.chats import Chat, Comparison
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError, quote
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.detokenizer import StopStrings, StreamingDetokenizer, detokenize
from allyouneed.infer.decoding.notes import loop_note
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.base import EvaluationResult, check_texts, evenly_spaced
from allyouneed.infer.predictors.chatting import ChatAnswer, ChatMethods, Messages, choose_by_reward
from allyouneed.infer.predictors.generating import CallOptions
from allyouneed.infer.predictors.reward import RewardModel
from allyouneed.infer.request import Medium
from allyouneed.infer.retrieval.predictor import RetrievalPredictor
from allyouneed.infer.speculative.stats import DraftStats, total_stats
from allyouneed.nn.batch import Neighbours

SHOWN = 16  # tokens of a document that prompt a sample


class EncodedPrompt(NamedTuple):
    """A prompt as tokens and media, and as a text, with placeholders for the media."""

    text: str
    tokens: list[int]
    media: tuple[Medium, ...] = ()


@dataclass(frozen=True)
class Continuation:
    """A continuation. `score`: log-probability over length penalty; `tokens`: number of new tokens; `finished`: it
    ended with an end token or a stop string."""

    text: str
    score: float
    tokens: int
    finished: bool


@dataclass(frozen=True)
class Generation:
    """A prompt and its continuations, best first. `guesses`: acceptance of draft tokens, with speculative decoding."""

    prompt: str
    candidates: list[Continuation]
    notes: list[str] = field(default_factory=list)
    guesses: DraftStats | None = None

    @property
    def text(self) -> str:
        return self.candidates[0].text


class Generator(ChatMethods, RetrievalPredictor):
    """Continues prompts with a language model. A model trained on pairs of prompt and answer generates the answer, one
    with a chat template answers chats."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        prompted = bool(folder.task.get("prompts"))  # trained by `seq2seq`
        self.prefix = folder.task["kind"] == "prefix-lm" or prompted
        self.answers = prompted or (self.prefix and folder.task.get("reads") == "pairs")

    def build_engine(self) -> Engine:
        tokenizer, marks = self.tokenizer, self.tokenizer.template
        specials = [number for number in tokenizer.specials if number != tokenizer.eos]
        return Engine(
            self.model,
            tokenizer.bos,
            tokenizer.eos,
            tokenizer.pad,
            marks.never if tokenizer.foreign else specials,  # imported models may generate special tokens
            self.limit,
            bidirectional_prompt=self.prefix,
            ends=marks.stops,
            ended=marks.ended,
        )

    @overload
    def generate(self, prompts: str, **options: Any) -> str: ...

    @overload
    def generate(self, prompts: Sequence[str], **options: Any) -> list[str]: ...

    def generate(self, prompts: str | Sequence[str], **options: Any) -> str | list[str]:
        """The continuation of a prompt, or of each of a list. `options`: see `generate_full`; `method="greedy"`,
        `max_length=200`, `temperature=0.8`, `seed=3`, …"""
        many = [prompts] if isinstance(prompts, str) else prompts
        found = [full.text for full in self.generate_full(many, **options)]
        return found[0] if isinstance(prompts, str) else found

    def generate_full(self, prompts: Sequence[str], *, specials: bool = False, **options: Any) -> list[Generation]:
        """The same with scores, several continuations (`best=3`) and notes. `specials`: parse special tokens of an
        imported model in the prompt. `options`: see `call_options`; `max_length`: the most new tokens, default `extra`;
        `stop`: strings before which a text ends."""
        texts = check_texts(prompts, "generate_full")
        self.retrieve_as_trained()
        call = self.call_options(**options)
        return self._complete([EncodedPrompt(text, self._prompt(text, specials)) for text in texts], call)

    def stream(self, prompt: str, *, specials: bool = False, **options: Any) -> Coroutine[str, None, Generation]:
        """Stream the text of `generate` in pieces of whole characters, without stop strings; a beam search yields all
        of it at the end. The generator returns the `Generation` (`yield from`). `options`: see `generate_full`."""
        (text,) = check_texts([prompt], "stream")
        self.retrieve_as_trained()
        call = self._stream_options(options)
        return self._stream(EncodedPrompt(text, self._prompt(text, specials)), call)

    def _neighbours(self, tokens: list[int]) -> Neighbours | None:
        """Neighbours of every complete chunk (RETRO)."""
        if self.retriever is None:
            return None
        config, size = self.model.config, self.model.config.chunk
        chunks = [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]
        found = self.retriever.search(chunks, count=config.neighbours)
        return Neighbours.of([found], config.neighbours, config.length, self.tokenizer.pad) if chunks else None

    def chat(self, messages: Messages, **options: Any) -> str:
        """The answer to a chat: a text, or messages with `role` and `content`. `options`: see `chat_full`."""
        return self.chat_full(messages, **options).text

    def chat_full(
        self, messages: Messages, *, best_of: int | None = None, reward: RewardModel | None = None, **options: Any
    ) -> ChatAnswer:
        """The same with all candidates. `best_of` and `reward`: draw several answers and choose the one with the
        highest reward (best-of-n: Nakano et al. 2021, 3.2, "rejection sampling"). `options`: see `generate_full`."""
        if (best_of is None) != (reward is None):
            raise UserError("best_of and reward belong together: the number of answers, and the model that chooses one")
        checked, prompt = self.chat_prompt(messages)
        options |= {} if best_of is None else {"method": "sample", "best": best_of}
        call = self.call_options(**options)
        self._check_length(checked[-1]["content"], prompt)
        (found,) = self._complete([EncodedPrompt(checked[-1]["content"], prompt)], call)
        texts, rewards = [one.text for one in found.candidates], list[float]()
        if reward is not None:
            texts, rewards = choose_by_reward(reward, checked, texts)
        return ChatAnswer(checked, texts[0], texts, rewards, found.notes)

    def stream_chat(self, messages: Messages, **options: Any) -> Coroutine[str, None, Generation]:
        """Stream the text of `chat` as `stream` does."""
        checked, prompt = self.chat_prompt(messages)
        self._check_length(checked[-1]["content"], prompt)
        return self._stream(EncodedPrompt(checked[-1]["content"], prompt), self._stream_options(options))

    def prepare_items(self, items: Items) -> Items:
        if self.folder.task["kind"] != "dpo":
            return super().prepare_items(items)
        from allyouneed.interop.load import load
        from allyouneed.tasks.feedback.dpo import Reference, reference_path

        return Reference(load(reference_path(self.folder.task.get("reference")), self.device).model).apply(items)

    def _complete(self, prompts: Sequence[EncodedPrompt], call: CallOptions) -> list[Generation]:
        options = call.decoding
        answers = self.engine.complete(
            [prompt.tokens for prompt in prompts],
            options,
            call.on_progress,
            call.first,
            self._stops(options),
            call.draft,
            [prompt.media for prompt in prompts],
        )
        both = zip(prompts, answers, strict=True)
        return [self._generation(prompt.text, prompt.tokens, found, options) for prompt, found in both]

    def _stream_options(self, options: dict[str, Any]) -> CallOptions:
        call = self.call_options(**options)
        if call.decoding.best > 1:
            raise UserError(f"best={call.decoding.best}: `stream` yields one text; remove `best`, or use generate_full")
        return call

    def _stream(self, prompt: EncodedPrompt, call: CallOptions) -> Coroutine[str, None, Generation]:
        options = call.decoding
        detokenizer = StreamingDetokenizer(self.tokenizer, self._context(prompt.tokens), options.stop)
        tokens = self.engine.stream(prompt.tokens, options, call.first, self._stops(options), call.draft, prompt.media)
        while True:
            try:
                piece = detokenizer.add(next(tokens))
            except StopIteration as stopped:
                answer: Hypothesis = stopped.value
                break
            if piece:
                yield piece
        if rest := detokenizer.end():
            yield rest
        return self._generation(prompt.text, prompt.tokens, [answer], options)

    def _stops(self, options: Decoding) -> StopStrings | None:
        return StopStrings(self.tokenizer, options.stop) if options.stop else None

    def _prompt(self, text: str, specials: bool) -> list[int]:
        ids = prompt_tokens(self.tokenizer, text, self.answers, specials)
        self._check_length(text, ids)
        return ids

    def _check_length(self, text: str, ids: list[int]) -> None:
        if self.limit is not None and len(ids) > self.limit:
            raise UserError(
                f"{quote(text)}: {len(ids)} tokens with special tokens, more than the model's {self.limit}; shorten it"
            )

    def _context(self, prompt: list[int]) -> list[int]:
        """The tokens before the generated text, on which its detokenization may depend."""
        return [] if self.answers else prompt

    def _generation(self, text: str, prompt: list[int], answers: list[Hypothesis], options: Decoding) -> Generation:
        found = []
        for answer in answers:
            added = detokenize(self.tokenizer, answer.tokens, self._context(prompt), options.stop)
            found.append(Continuation(added, answer.score, len(answer.tokens), answer.finished))
        notes = []
        longest = len(prompt) + len(answers[0].tokens)
        if longest > self.folder.max_tokens:
            notes.append(
                f"{quote(text)}: {longest} tokens with the continuation; it was trained on {self.folder.max_tokens}"
            )
        best, count = answers[0], len(answers[0].tokens)
        if best.repeats:
            notes.append(loop_note(text, count))
        elif not best.finished and count < options.continuation_limit():
            notes.append(f"{quote(text)}: stopped after {count} tokens at the model's limit of {self.limit}")
        return Generation(text, found, notes, total_stats([answers]))

    def judge(
        self, examples: Sequence[Any], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        """Samples only; a language model is scored by its perplexity."""
        shown = evenly_spaced(examples, show)
        if shown and isinstance(shown[0], Chat | Comparison):
            return EvaluationResult({}, "", [self._chat_sample(example, decoding) for example in shown])
        if self.answers:
            prompts = [example.texts[0] for example in shown]
        else:
            prompts = [self.tokenizer.decode(self.tokenizer.encode(e.texts[0])[:SHOWN]) for e in shown]
        found = self.generate(prompts, decoding=decoding) if prompts else []
        samples = []
        for example, prompt, text in zip(shown, prompts, found, strict=True):
            samples.append({"prompt": prompt, "continuation": text})
            if self.answers:
                samples[-1]["expected"] = example.texts[1]
        return EvaluationResult({}, "", samples)

    def _chat_sample(self, example: Chat | Comparison, decoding: Decoding | None) -> dict[str, str]:
        """The last answer of a chat, or the preferred one of a comparison, and what the model answers."""
        if isinstance(example, Comparison):
            messages, expected = list(example.messages), example.chosen
        else:
            last = max(n for n, message in enumerate(example.messages) if message["role"] == "assistant")
            messages, expected = list(example.messages[:last]), example.messages[last]["content"]
        answer = self.chat(messages, decoding=decoding) if messages else ""
        return {"prompt": messages[-1]["content"] if messages else "", "answer": answer, "expected": expected}


def prompt_tokens(tokenizer: Tokenizer, text: str, answers: bool, specials: bool = False) -> list[int]:
    """A text as a language model reads it. `answers`: the text ends, and its answer follows."""
    ids = [*tokenizer.opening, *tokenizer.encode(text, specials), *([tokenizer.eos] if answers else [])]
    return ids or [tokenizer.eos]  # without a begin token, a text starts after the end of another (GPT-2)
