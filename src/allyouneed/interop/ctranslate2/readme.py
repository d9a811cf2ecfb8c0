"""How a model written for CTranslate2 is called: it reads and says tokens, and leaves the rest to whoever calls it."""

from __future__ import annotations

from typing import Any

from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.folder import Folder

LONGEST = 256  # tokens, what CTranslate2 writes unless told otherwise
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

Written by allyouneed from a model for {task}. It reads tokens, not texts, and wants them framed: {frame}.{more}

```python
import ctranslate2, tokenizers

words = tokenizers.Tokenizer.from_file("tokenizer.json")
words.encode_special_tokens = True  # a text is only text, whatever it spells
{target}tokens = [{before}*words.encode("…", add_special_tokens=False).tokens{after}]
{call}
```
"""


HEARS = """# A model for CTranslate2

Written by allyouneed from a Whisper. It reads log-mel frames, {seconds:g} seconds at once. The first tokens tell it
what to do:{languages} without the last one it tells the times as well.

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
    """What stands around a text, how a target begins, what is never said."""
    return _hears(folder) if kind == "sound" else _reads(folder, kind)


def _hears(folder: Folder) -> str:
    name, task = _names(folder.tokenizers.target), folder.task
    prompt = [task.get("start"), *list(task.get("languages", {}).values())[:1], task.get("tasks", {}).get("transcribe")]
    known = ", ".join(task.get("languages", {}))
    model: Any = folder.model
    return HEARS.format(
        seconds=task.get("seconds", 30.0),
        languages=f" one of them is a language ({known})," if known else "",
        mels=model.source_embed.mels,
        longest="" if model.config.limit is None else f", max_length={model.config.limit}",
        prompt=[name(n) for n in (*prompt, task.get("no_timestamps")) if n is not None],
    )


def _reads(folder: Folder, kind: str) -> str:
    source, target = folder.tokenizers.source, folder.tokenizers.target
    before, after, prefix, more = source.template.before, source.template.after, tuple[int, ...](), list[str]()
    if kind == "decoder":
        before, after = target.opening, ()
    if kind == "encoder-decoder":
        before, after = source.source_affixes
        before, after = _with_language(source, before, after, more)
        prefix = _beginning(source, target, (*before, *after))
    names, said = _names(source), _names(target)
    limit: int | None = folder.model.config.limit  # type: ignore[union-attr, assignment]
    options = f", target_prefix=[{[said(n) for n in prefix]}]" if prefix else ""
    if never := _never(kind, target):
        options += f", suppress_sequences={[[said(n)] for n in never]}"
    if target.template.stops and kind != "encoder":
        options += f", end_token={[said(n) for n in (target.eos, *target.template.stops)]}"
    if limit is not None and limit < LONGEST and kind == "encoder-decoder":
        options += f", max_decoding_length={limit}"
    own = source.text != target.text and kind == "encoder-decoder"
    call = CALLS[kind].format(
        longest=50 if limit is None else min(50, limit // 2),
        options=options,
        words="theirs" if own else "words",
        beam=folder.decoding.get("beam", 4),
    )
    marks = [*(f"`{names(n)}`" for n in before), "the text", *(f"`{names(n)}`" for n in after)]
    return README.format(
        task=folder.task["kind"],
        frame=" ".join(marks),
        more="".join(f" {text}." for text in more),
        target='theirs = tokenizers.Tokenizer.from_file("tokenizer.target.json")\n' if own else "",
        before="".join(f"{names(n)!r}, " for n in before),
        after="".join(f", {names(n)!r}" for n in after),
        call=call,
    )


def inner_of(tokenizer: Tokenizer) -> Any:
    """A copy of the library's own tokenizer inside ours."""
    from tokenizers import Tokenizer as Inner

    return Inner.from_str(tokenizer.text)


def _names(tokenizer: Tokenizer) -> Any:
    inner = inner_of(tokenizer)
    return lambda number: str(inner.id_to_token(number))


def _never(kind: str, target: Tokenizer) -> list[int]:
    """As the predictors have it: ours say no special tokens."""
    if kind == "encoder":
        return []
    return list(target.template.never) if target.foreign else [n for n in target.specials if n != target.eos]


def _with_language(source: Tokenizer, before: Any, after: Any, more: list[str]) -> tuple[Any, Any]:
    """The marks with that of a language: the one spoken, or the one to translate into (`more` says which)."""
    if not source.languages:
        return before, after
    known = ", ".join(source.languages)
    first = next(iter(source.languages.values()))
    if source.template.language is None:
        more.append(f"The first token is that of the language to translate into, one of {known}")
        return (*before, first), after
    spoken = first if source.template.spoken is None else source.template.spoken
    more.append(
        "One of these tokens is that of the language the text is in; what the target begins with is that of the "
        f"language to translate into; known are {known}"
    )
    return ((spoken, *before), after) if source.template.language == "before" else (before, (*after, spoken))


def _beginning(source: Tokenizer, target: Tokenizer, around: tuple[int, ...]) -> tuple[int, ...]:
    """What a target begins with behind its first token. Of a model that has to be told the language and is not, one
    that is not spoken in the source."""
    found = (*target.opening[1:], *target.template.forced)
    codes = set(source.languages.values())
    if source.template.language is None or codes & {*target.opening, *found}:
        return found
    return (*found, *[code for code in sorted(codes) if code not in around][:1])
