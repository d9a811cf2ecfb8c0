"""What each predictor's model reads for one input: `model.inside(…)` (docs/inside.md).

One function per class of predictor; a subclass is read as its nearest base class. Predictors are found by the name of
their class, so that none is imported that is not in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from allyouneed.apps.inspect.inside.reading import (
    Prediction,
    Reading,
    frame_media,
    next_tokens,
    output_name,
    patch_media,
    read_labels,
    read_text,
    tokens_of,
)
from allyouneed.config import parse
from allyouneed.errors import UserError, quote
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.frames import Frame, default_frame, forbidden_tokens, generate_targets
from allyouneed.infer.predictors.base import check_texts
from allyouneed.nn.batch import MEDIA, Batch, Media, Rows, Signal
from allyouneed.runtime.process import evaluation_mode

Reader = Callable[..., Reading]  # (predictor, given, target, **options)
READERS: dict[str, Reader] = {}


def read_input(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    """What the model reads for this input, as a batch of one, and how its output reads."""
    for cls in type(predictor).__mro__:
        if cls.__name__ in READERS:
            return READERS[cls.__name__](predictor, given, target, **options)
    raise UserError(f"{type(predictor).__name__} cannot show what is inside its model")


def reads(*predictors: str) -> Callable[[Reader], Reader]:
    """Register the reader of these classes of predictors."""

    def register(reader: Reader) -> Reader:
        READERS.update(dict.fromkeys(predictors, reader))
        return reader

    return register


@reads("Classifier")
def read_classifier(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    row, _ = predictor._row(predictor._check_input(given))
    return read_labels(
        read_text(predictor.tokenizer, predictor.to_rows([row]), predictor._stack), predictor.labels, "classes"
    )


@reads("QuestionAnswerer")
def read_question_answerer(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    """`given`: a question; `target`: the text, of which the first window is shown."""
    question, text = check_texts([given, target or ""], "inside")
    ids = predictor.tokenizer.encode(question)
    room = predictor._room(question, ids)
    row = predictor.tokenizer.frame(ids, predictor.tokenizer.encode(text)[:room])
    return read_text(predictor.tokenizer, predictor.to_rows([row]))


@reads("RewardModel")
def read_reward_model(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    """`given`: a prompt; `target`: the answer that is scored."""
    row = predictor._row(given, target or "")
    rows = predictor.to_rows([(row, [0] * len(row))])
    return read_labels(read_text(predictor.tokenizer, rows, "decoder"), ["reward"], "classes")


@reads("Tagger")
def read_tagger(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    """The first part of a sentence, if it is longer than the training length."""
    from allyouneed.data.batches.encoding import encode_words

    words = predictor._words(given)
    foreign = predictor.tokenizer.foreign
    encoded = predictor._encode_in_text(given, words) if foreign else encode_words(predictor.tokenizer, [words])[0]
    row = predictor.tokenizer.frame([number for word in predictor._parts(encoded)[0] for number in word])
    return read_labels(read_text(predictor.tokenizer, predictor.to_rows([row])), predictor.labels, "tags")


@reads("Embedder")
def read_embedder(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    (text,) = check_texts([given], "inside")
    stack = "decoder" if predictor.model.config.kind == "decoder" else "encoder"
    return read_text(predictor.tokenizer, predictor.to_rows([predictor.encode_truncated(text)]), stack, output="vector")


@reads("MaskFiller")
def read_mask_filler(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    (text,) = check_texts([given], "inside")
    return _read_masked(predictor, predictor.to_rows([predictor._row(text)]))


@reads("PermutationMaskFiller")
def read_permutation_mask_filler(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    (text,) = check_texts([given], "inside")
    rows = predictor.to_rows([predictor._row(text)])
    queried = predictor._with_queries(rows)
    return _read_masked(predictor, queried, range(rows.tokens.shape[1], queried.tokens.shape[1]))


def _read_masked(predictor: Any, rows: Rows, positions: Sequence[int] | None = None) -> Reading:
    """`positions`: of the outputs for the masks; default: the masks themselves."""
    if positions is None:
        positions = (rows.tokens[0] == predictor.mask).nonzero().flatten().tolist()

    def replies(logits: Tensor) -> list[Prediction]:
        text = logits[0].clone()
        text[:, [*predictor.tokenizer.specials, *range(predictor.tokenizer.size, text.shape[1])]] = float("-inf")
        return [Prediction(position, int(text[position].argmax())) for position in positions]

    more: dict[str, Any] = {"output": "mask", "name": output_name(predictor.tokenizer), "replies": replies}
    return read_text(predictor.tokenizer, rows, **more)


@reads("SpanFiller")
def read_span_filler(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    """`target`: the text of the first gap."""
    (text,) = check_texts([given], "inside")
    begin = (predictor.tokenizer.bos,) if target is None else (predictor.tokenizer.bos, predictor.sentinels[0])
    frame = Frame((), (), begin)
    return _read_pair(predictor, frame, predictor._source(predictor._parts(text)), target, options)


@reads("Seq2Seq")
def read_seq2seq(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    if predictor.writer is not None:
        return read_generator(predictor.writer, given, target, **options)
    (text,) = check_texts([given], "inside")
    frame = default_frame(predictor.folder.tokenizers)
    source = frame.source(predictor.folder.tokenizers.source.encode(text, options.pop("specials", False)))
    return _read_pair(predictor, frame, source, target, options)


@reads("Translator")
def read_translator(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    """One sentence, translated directly, without protected spans: what the model itself reads."""
    (text,) = check_texts([given], "inside")
    to, from_ = predictor.frames.resolve(options.pop("to", None), options.pop("from_", None))
    route = predictor.routes.of(text, to, from_)
    if len(route.into) != 1:
        why = f"goes via {route.into[0]}: take one step at a time" if route.into else f"is already in {route.here}"
        raise UserError(f"{quote(text)}: {why}; set to= or from_=")
    frame = predictor.frames.last_of(route)
    source = frame.source(predictor.source.encode(text))
    return _read_pair(predictor, frame, source, target, options)


@reads("Generator")
def read_generator(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    (text,) = check_texts([given], "inside")
    predictor.retrieve_as_trained()
    prompt = predictor._prompt(text, options.pop("specials", False))
    if target is None:
        best = predictor.engine.complete([prompt], predictor.decoding_options({"method": "greedy"} | options))[0][0]
        answer = [*best.tokens, *([predictor.tokenizer.eos] if best.finished else [])]
    elif not isinstance(target, str):
        raise UserError(f"target: expected a text, got {type(target).__name__}")
    else:
        answer = [*predictor.tokenizer.encode(target), predictor.tokenizer.eos]
    inputs = [*prompt, *answer[:-1]]
    rows = Rows.of([inputs])
    if predictor.prefix:
        rows = replace(rows, prompt=torch.arange(len(inputs))[None] < len(prompt))
    stacks = ("first", "second") if predictor.model.config.kind == "decoder-decoder" else ("decoder",)
    tokens = dict.fromkeys(stacks, tokens_of(predictor.tokenizer, inputs))
    neighbours = predictor._neighbours(inputs)
    if neighbours is not None:
        tokens["encoder"] = tokens_of(predictor.tokenizer, neighbours.tokens[0].flatten().tolist())
    batch = Batch(rows, neighbours).to(predictor.device)
    answers = next_tokens(inputs, answer[-1] if answer else None, len(prompt))
    runner = predictor.engine.runner
    never, ends = tuple(runner.forbidden), (runner.eos, *runner.ends)
    name = output_name(predictor.tokenizer)
    return Reading(batch, tokens, answers, given=len(prompt), name=name, never=never, ends=ends)


@reads("InterleavedGenerator")
def read_interleaved(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    read = predictor.read_prompt(given, options.pop("images", ()), options.pop("audio", ()))
    if target is None:
        decoding = predictor.decoding_options({"method": "greedy"} | options)
        best = predictor.engine.complete([read.tokens], decoding, media=[read.media])[0][0]
        answer = [*best.tokens, *([predictor.tokenizer.eos] if best.finished else [])]
    elif not isinstance(target, str):
        raise UserError(f"target: expected a text, got {type(target).__name__}")
    else:
        answer = [*predictor.tokenizer.encode(target), predictor.tokenizer.eos]
    inputs = [*read.tokens, *answer[:-1]]
    slots = torch.zeros(1, len(inputs), dtype=torch.long)
    for medium in read.media:
        slots[0, medium.at : medium.at + medium.slots] = MEDIA.index(medium.kind) + 1
    values = {kind: [medium.values for medium in read.media if medium.kind == kind] for kind in MEDIA}
    media = Media(**{kind: torch.stack(some) for kind, some in values.items() if some})
    batch = Batch(Rows(torch.tensor([inputs]), slots=slots), media).to(predictor.device)
    tokens = {"decoder": tokens_of(predictor.tokenizer, inputs)}
    answers = next_tokens(inputs, answer[-1] if answer else None, len(read.tokens))
    runner = predictor.engine.runner
    never, ends = tuple(runner.forbidden), (runner.eos, *runner.ends)
    name = output_name(predictor.tokenizer)
    return Reading(batch, tokens, answers, given=len(read.tokens), name=name, never=never, ends=ends)


@reads("ImageClassifier")
def read_image_classifier(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    from allyouneed.infer.predictors.image_classifier import pixels_of, read_images

    pixels = read_images(pixels_of(predictor.folder), [given])
    signal = Signal(pixels.to(predictor.device, next(predictor.model.parameters()).dtype))
    tokens, media = patch_media(predictor.model.config.embed, pixels[0])
    reading = Reading(Batch(signal), {"encoder": tokens}, media={"encoder": media})
    return read_labels(reading, predictor.labels, "classes") if predictor.labels else replace(reading, output="vector")


@reads("AudioClassifier")
def read_audio_classifier(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    reader = predictor.reader
    return read_labels(_heard(predictor, reader.features(reader.read(given))), predictor.labels, "classes")


@reads("CtcTranscriber")
def read_ctc_transcriber(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    """The first window of a sound, with the output of every position; the blank is empty."""
    track = predictor.track(0, given)
    if track.at >= track.total:
        raise UserError(f"{'; '.join(track.notes)}: there is nothing to look inside")
    name = output_name(predictor.tokenizer)
    names = ["" if number == predictor.tokenizer.pad else name(number) for number in range(predictor.tokenizer.size)]
    return read_labels(_heard(predictor, track.frames[:, : predictor.piece(track)]), names, "tags")


def _heard(predictor: Any, features: Tensor) -> Reading:
    signal = Signal(features[None].to(predictor.device, next(predictor.model.parameters()).dtype))
    tokens, media = frame_media(features, predictor.model.config.embed.positions_of(features.shape[-1]))
    return Reading(Batch(signal), {"encoder": tokens}, media={"encoder": media})


@reads("Captioner")
def read_captioner(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    """An image and its text, which is `target`, or decoded."""
    from allyouneed.infer.predictors.image_classifier import pixels_of, read_images

    vocabulary = predictor.folder.tokenizers.target
    (text,) = check_texts([predictor.caption(given, **options) if target is None else target], "target")
    pixels = read_images(pixels_of(predictor.folder), [given])
    signal = Signal(pixels.to(predictor.device, next(predictor.model.parameters()).dtype))
    tokens, media = patch_media(predictor.model.config.source_embed, pixels[0])
    inputs = [vocabulary.opening[0] if vocabulary.opening else vocabulary.bos, *vocabulary.encode(text)]
    inputs = inputs[: predictor.model.config.limit]
    return Reading(
        Batch(Rows.of([inputs]).to(predictor.device), signal),
        {"encoder": tokens, "decoder": tokens_of(vocabulary, inputs)},
        next_tokens(inputs, vocabulary.eos, 1),
        given=1,
        name=output_name(vocabulary),
        never=tuple(forbidden_tokens(vocabulary)),
        ends=(vocabulary.eos,),
        media={"encoder": media},
    )


@reads("ImageMatcher")
def read_image_matcher(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    """An image and a text (`target`)."""
    if not isinstance(target, str):
        raise UserError('an image and a text are matched: model.inside(image, target="a text")')
    from allyouneed.infer.predictors.image_classifier import pixels_of, read_images

    pixels = read_images(pixels_of(predictor.folder), [given])
    rows = predictor.to_rows([predictor.encode_truncated(target)])
    signal = Signal(pixels.to(predictor.device, next(predictor.model.parameters()).dtype))
    tokens, media = patch_media(predictor.model.config.image.embed, pixels[0])
    both = {"image.encoder": tokens, "text.encoder": tokens_of(predictor.tokenizer, rows.tokens[0].tolist())}
    answers = [Prediction(None, 0)]
    media_of = {"image.encoder": media}
    return Reading(Batch(rows, signal), both, answers, "similarity", name=lambda _: target, media=media_of)


@reads("Transcriber")
def read_transcriber(predictor: Any, given: Any, target: Any = None, **options: Any) -> Reading:
    """The first window of a sound, without timestamps."""
    from allyouneed.infer.speech.fallback import TranscriptionOptions

    task = options.pop("task", "transcribe")
    track = predictor.track(0, given, predictor.check(options.pop("language", None), task))
    if track.at >= track.total:
        raise UserError(f"{'; '.join(track.notes)}: there is nothing to look inside")
    values = predictor._window_frames(track)[None].to(predictor.device, next(predictor.model.parameters()).dtype)
    settings = parse(TranscriptionOptions, {"beam": 1, "temperatures": (0,)} | options, "inside")
    with torch.no_grad(), evaluation_mode(predictor.model):
        memory = predictor._encode([track])
        if track.language is None and predictor.languages:
            track.language = predictor.languages[int(predictor._language_probabilities(memory).argmax())]
        prompt = predictor._prompt(track, task, timed=False)
        if target is None:
            answer = list(predictor._decode(memory, [track], task, False, settings, 0.0)[0].tokens)
        else:
            answer = predictor.tokenizer.encode(str(target))
    answer = [token for token in answer if token != predictor.speech.end]
    ended = target is not None or len(answer) < predictor._token_limit(prompt)
    inputs = [*prompt, *(answer if ended else answer[:-1])]
    tokens, media = frame_media(values[0].cpu(), memory.hidden.shape[1])
    return Reading(
        Batch(Rows.of([inputs]).to(predictor.device), Signal(values)),
        {"encoder": tokens, "decoder": tokens_of(predictor.tokenizer, inputs)},
        next_tokens(inputs, predictor.speech.end if ended else answer[-1], len(prompt)),
        given=len(prompt),
        name=output_name(predictor.tokenizer),
        never=tuple(predictor.speech.suppress),
        ends=(predictor.speech.end,),
        media={"encoder": media},
    )


def _read_pair(predictor: Any, frame: Frame, source: Sequence[int], target: Any, options: Mapping[str, Any]) -> Reading:
    """A source and its target, given as text or decoded greedily."""
    engine, folder = predictor.engine, predictor.folder
    vocabularies, config = folder.tokenizers, engine.model.config
    limit = getattr(config, "source_limit", config.limit)
    if limit is not None and len(source) > limit:
        raise UserError(f"{len(source)} tokens with special tokens, more than the model's {limit}; shorten the text")
    if target is None:
        decoding = Decoding.of(folder.decoding, **({"method": "greedy"} | dict(options)))
        best = generate_targets(engine, frame, [list(source)], decoding)[0][0]
        answer = [*best.tokens, *([vocabularies.target.eos] if best.finished else [])]
    elif not isinstance(target, str):
        raise UserError(f"target: expected a text, got {type(target).__name__}")
    else:
        answer = [*vocabularies.target.encode(target), vocabularies.target.eos]
    begin = frame.begin
    inputs = [*begin, *answer[:-1]]
    batch = Batch(Rows.of([inputs]), Rows.of([list(source)])).to(engine.device)
    tokens = {
        "encoder": tokens_of(vocabularies.source, source),
        "decoder": tokens_of(vocabularies.target, inputs),
    }
    answers = next_tokens(inputs, answer[-1] if answer else None, len(begin))
    runner = engine.runner
    never, ends = tuple(runner.forbidden), (runner.eos, *runner.ends)
    name = output_name(vocabularies.target)
    return Reading(batch, tokens, answers, given=len(begin), name=name, never=never, ends=ends)
