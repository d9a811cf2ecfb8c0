"""The README of a CTranslate2 folder: its models map tokens to tokens, so it shows the tokenization around them."""

from __future__ import annotations

from typing import Any

from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.folder import Folder

DEFAULT_MAX_LENGTH = 256  # tokens, CTranslate2's default
CALLS = {
    "encoder-decoder": """model = ctranslate2.Translator(".")
found = model.translate_batch([tokens], beam_size={beam}{options})[0].hypotheses[0]
print({words}.decode([{words}.token_to_id(token) for token in found]))""",
    "decoder": """model = ctranslate2.Generator(".")
found = model.generate_batch([tokens], max_length={longest}, include_prompt_in_result=False{options})
print(words.decode(found[0].sequences_ids[0]))""",
    "encoder": """model = ctranslate2.Encoder(".")
found = model.forward_batch([tokens]).last_hidden_state  # (1, tokens, width)""",
}
README = """# A model for CTranslate2

Exported by allyouneed from a model for {task}. Its input is tokens with these special tokens: {frame}.{more}

```python
import ctranslate2, tokenizers

words = tokenizers.Tokenizer.from_file("tokenizer.json")
words.encode_special_tokens = True  # never parse special tokens in the text
{target}tokens = [{before}*words.encode("…", add_special_tokens=False).tokens{after}]
{call}
```
"""


WHISPER_README = """# A model for CTranslate2

Exported by allyouneed from a Whisper model. Its input is {seconds:g} seconds of log-mel frames. The prompt selects the
task:{languages} without its last token the model also predicts timestamps.

```python
import ctranslate2, tokenizers
from allyouneed.data.media.sound import log_mel
from allyouneed.data.media.sound_files import read_sound

words = tokenizers.Tokenizer.from_file("tokenizer.json")
frames = log_mel(read_sound("speech.wav"), {mels}, seconds={seconds:g})[None].numpy()
model = ctranslate2.models.Whisper(".")
found = model.generate(ctranslate2.StorageView.from_array(frames), [{prompt}]{longest})[0].sequences_ids[0]
print(words.decode(found))
```
"""


def readme(folder: Folder, kind: str) -> str:
    """Special tokens around the input, start of the target, banned tokens."""
    return _whisper_readme(folder) if kind == "sound" else _text_readme(folder, kind)


def _whisper_readme(folder: Folder) -> str:
    name, task = _names(folder.tokenizers.target), folder.task
    prompt = [task.get("start"), *list(task.get("languages", {}).values())[:1], task.get("tasks", {}).get("transcribe")]
    known = ", ".join(task.get("languages", {}))
    model: Any = folder.model
    return WHISPER_README.format(
        seconds=task.get("seconds", 30.0),
        languages=f" one token is the language ({known})," if known else "",
        mels=model.source_embed.mels,
        longest="" if model.config.limit is None else f", max_length={model.config.limit}",
        prompt=[name(n) for n in (*prompt, task.get("no_timestamps")) if n is not None],
    )


def _text_readme(folder: Folder, kind: str) -> str:
    source, target = folder.tokenizers.source, folder.tokenizers.target
    before, after, prefix, more = source.template.before, source.template.after, tuple[int, ...](), list[str]()
    if kind == "decoder":
        before, after = target.opening, ()
    if kind == "encoder-decoder":
        before, after = source.source_affixes
        before, after = _with_language(source, before, after, more)
        prefix = _target_prefix(source, target, (*before, *after))
    names, target_names = _names(source), _names(target)
    limit: int | None = folder.model.config.limit  # type: ignore[union-attr, assignment]
    options = f", target_prefix=[{[target_names(n) for n in prefix]}]" if prefix else ""
    if banned := _banned(kind, target):
        options += f", suppress_sequences={[[target_names(n)] for n in banned]}"
    if target.template.stops and kind != "encoder":
        options += f", end_token={[target_names(n) for n in (target.eos, *target.template.stops)]}"
    if limit is not None and limit < DEFAULT_MAX_LENGTH and kind == "encoder-decoder":
        options += f", max_decoding_length={limit}"
    own = source.text != target.text and kind == "encoder-decoder"
    call = CALLS[kind].format(
        longest=50 if limit is None else min(50, limit // 2),
        options=options,
        words="target_words" if own else "words",
        beam=folder.decoding.get("beam", 4),
    )
    frame = [*(f"`{names(n)}`" for n in before), "the text", *(f"`{names(n)}`" for n in after)]
    return README.format(
        task=folder.task["kind"],
        frame=" ".join(frame),
        more="".join(f" {text}." for text in more),
        target='target_words = tokenizers.Tokenizer.from_file("tokenizer.target.json")\n' if own else "",
        before="".join(f"{names(n)!r}, " for n in before),
        after="".join(f", {names(n)!r}" for n in after),
        call=call,
    )


def inner_of(tokenizer: Tokenizer) -> Any:
    """A copy of the `tokenizers.Tokenizer` inside ours."""
    from tokenizers import Tokenizer as Inner

    return Inner.from_str(tokenizer.text)


def _names(tokenizer: Tokenizer) -> Any:
    inner = inner_of(tokenizer)
    return lambda number: str(inner.id_to_token(number))


def _banned(kind: str, target: Tokenizer) -> list[int]:
    """Banned tokens as in the predictors: our own models never generate special tokens."""
    if kind == "encoder":
        return []
    return list(target.template.never) if target.foreign else [n for n in target.specials if n != target.eos]


def _with_language(source: Tokenizer, before: Any, after: Any, more: list[str]) -> tuple[Any, Any]:
    """The special tokens with a language token, of the source or the target language (explained in `more`)."""
    if not source.languages:
        return before, after
    known = ", ".join(source.languages)
    first = next(iter(source.languages.values()))
    if source.template.language is None:
        more.append(f"The first token is the target language, one of {known}")
        return (*before, first), after
    spoken = first if source.template.spoken is None else source.template.spoken
    more.append(
        f"One of these tokens is the source language; the target prefix is the target language; both are one of {known}"
    )
    return ((spoken, *before), after) if source.template.language == "before" else (before, (*after, spoken))


def _target_prefix(source: Tokenizer, target: Tokenizer, around: tuple[int, ...]) -> tuple[int, ...]:
    """The target prefix after the start token. Where a model needs a target language and none is set, one that differs
    from the source language."""
    found = (*target.opening[1:], *target.template.forced)
    codes = set(source.languages.values())
    if source.template.language is None or codes & {*target.opening, *found}:
        return found
    return (*found, *[code for code in sorted(codes) if code not in around][:1])
