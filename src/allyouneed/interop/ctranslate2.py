"""A model folder as CTranslate2 runs it: model.bin, config.json, vocabularies, and a README on how to call it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from allyouneed.data.plain import unknown
from allyouneed.data.tokenizers import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import CARD, Folder
from allyouneed.interop.ctranslate2_spec import checked, fill_stack, switches
from allyouneed.interop.reader import Tree

PLACES = 1024  # as long a text as CTranslate2 reads unless told otherwise
SPECS = {
    "encoder-decoder": "TransformerSpec",
    "decoder": "TransformerDecoderModelSpec",
    "encoder": "TransformerEncoderModelSpec",
}
OWN_FILES = ("config.json", CARD)  # names that CTranslate2's folder has itself


def write(folder: Folder, out: Path) -> list[str]:
    """Write a folder of CTranslate2's into `out`, an empty one."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise UserError("--to ctranslate2 needs the library: pip install 'allyouneed[ctranslate2]'")
    where = folder.path or "the model"
    words = folder.tokenizers
    notes: list[str] = []
    try:
        tree = checked(folder.model)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    spec = made(folder, tree, notes)
    spec.config.layer_norm_epsilon = tree["norm"]["eps"]
    for key, token in special_tokens(tree, words).items():
        setattr(spec.config, key, token)
    spec.validate()
    spec.optimize()
    spec.save(str(out))
    notes += write_words(folder, out)
    (out / CARD).write_text(readme(folder, tree, words), encoding="utf-8")
    return notes


def made(folder: Folder, tree: Tree, notes: list[str]) -> Any:
    """The spec with all its weights and vocabularies."""
    from ctranslate2.specs import common_spec, transformer_spec

    model: Any = folder.model
    places = max(PLACES, 2 * folder.max_tokens)
    stacks = []
    if "encoder" in tree:
        embed = getattr(model, "source_embed", None) or model.embed
        options = switches(tree, "encoder")
        if embed.types is not None:
            options |= {"num_source_embeddings": 2, "embeddings_merge": common_spec.EmbeddingsMerge.ADD}
        stacks.append(transformer_spec.TransformerEncoderSpec(**options))
        fill_stack(stacks[-1], model.encoder, embed, places)
    if "decoder" in tree:
        stacks.append(transformer_spec.TransformerDecoderSpec(**switches(tree, "decoder")))
        fill_stack(stacks[-1], model.decoder, model.embed, places)
        fill_head(stacks[-1], model.head)
    if model.config.limit is None and any(hasattr(stack, "position_encodings") for stack in stacks):
        notes.append(f"positions are stored for {places} places; CTranslate2 refuses longer texts")
    spec = getattr(transformer_spec, SPECS[tree["kind"]])(*stacks)
    sizes, words = model.config.vocabs, folder.tokenizers
    if len(stacks) == 2:
        spec.register_source_vocabulary(vocabulary(words.source, sizes.source))
        spec.register_target_vocabulary(vocabulary(words.target, sizes.target))
    else:
        spec.register_vocabulary(vocabulary(words.target, sizes.target))
    return spec


def fill_head(spec: Any, head: Any) -> None:
    spec.projection.weight = head.weight.detach()
    if head.bias is not None:
        spec.projection.bias = head.bias.detach()
    if head.scale != 1.0:
        spec.scale_outputs = float(head.scale)
    if head.soft_cap is not None:
        spec.final_logit_softcapping = float(head.soft_cap)


# --- words ------------------------------------------------------------------------------------------------------------


def vocabulary(tokenizer: Tokenizer, size: int) -> list[str]:
    """Every token by the name its own tokenizer has for it; rows of the model that no token has get names too."""
    inner = _inner(tokenizer)
    found = [inner.id_to_token(number) for number in range(size)]
    taken = set(found)
    for number, name in enumerate(found):
        if name is None:
            name = f"<no token {number}>"
            while name in taken:
                name += ">"
            found[number] = name
    return found


def _inner(tokenizer: Tokenizer) -> Any:
    from tokenizers import Tokenizer as Inner

    return Inner.from_str(tokenizer.text)


def special_tokens(tree: Tree, words: Vocabularies) -> dict[str, str]:
    """Which tokens do what. Tokenizers over bytes know every text and need no unknown token, but there must be one."""
    target, inner = words.target, _inner(words.target)
    strange = unknown(inner)
    found = {"bos": target.bos, "eos": target.eos, "unk": target.pad if strange is None else strange}
    if tree["kind"] == "encoder-decoder":
        found["decoder_start"] = target.opening[0]
    return {f"{role}_token": inner.id_to_token(number) for role, number in found.items()}


def write_words(folder: Folder, out: Path) -> list[str]:
    """tokenizer.json, where one can say what the model's tokenizer does, and the files it came with."""
    words, notes = folder.tokenizers, []
    if words.source.beyond or words.target.beyond:
        notes.append("its tokenizer cannot be said by a tokenizer.json; cut texts with the original's own files")
    else:
        _inner(words.source).save(str(out / "tokenizer.json"))
        if words.source.text != words.target.text:
            _inner(words.target).save(str(out / "tokenizer.target.json"))
    for name, content in folder.originals.items():
        if name not in OWN_FILES and not (out / name).exists():
            (out / name).write_bytes(content)
    return notes


# --- how it is called -------------------------------------------------------------------------------------------------

CALLS = {
    "encoder-decoder": """model = ctranslate2.Translator(".")
found = model.translate_batch([tokens], beam_size={beam}{options})[0].hypotheses[0]
print({words}.decode([{words}.token_to_id(token) for token in found]))""",
    "decoder": """model = ctranslate2.Generator(".")
found = model.generate_batch([tokens], max_length=50, include_prompt_in_result=False{options})[0].sequences_ids[0]
print(words.decode(found))""",
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


def readme(folder: Folder, tree: Tree, words: Vocabularies) -> str:
    """What CTranslate2 leaves to the caller: what stands around a text, how a target begins, what is never said."""
    kind, (source, target), more = tree["kind"], (words.source, words.target), list[str]()
    before, after, prefix = words.source.marks.before, words.source.marks.after, tuple[int, ...]()
    if kind == "decoder":
        before, after = target.opening, ()
    if kind == "encoder-decoder":
        before, after = source.around
        prefix = (*target.opening[1:], *target.marks.forced)
        before, after = _with_language(source, before, after, more)
    names, said = _names(source), _names(target)
    options = f", target_prefix=[{[said(n) for n in prefix]}]" if prefix else ""
    if never := _never(kind, target):
        options += f", suppress_sequences={[[said(n)] for n in never]}"
    if target.marks.stops and kind != "encoder":
        options += f", end_token={[said(n) for n in (target.eos, *target.marks.stops)]}"
    own = source.text != target.text and kind == "encoder-decoder"
    call = CALLS[kind].format(options=options, words="theirs" if own else "words", beam=folder.decoding.get("beam", 4))
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


def _names(tokenizer: Tokenizer) -> Any:
    inner = _inner(tokenizer)
    return lambda number: str(inner.id_to_token(number))


def _never(kind: str, target: Tokenizer) -> list[int]:
    """As the predictors have it: ours say no special tokens."""
    if kind == "encoder":
        return []
    return list(target.marks.never) if target.foreign else [n for n in target.specials if n != target.eos]


def _with_language(source: Tokenizer, before: Any, after: Any, more: list[str]) -> tuple[Any, Any]:
    """The marks with that of a language: the one spoken, or the one to translate into (`more` says which)."""
    if not source.languages:
        return before, after
    known = ", ".join(source.languages)
    first = next(iter(source.languages.values()))
    if source.marks.language is None:
        more.append(f"The first token is that of the language to translate into, one of {known}")
        return (*before, first), after
    spoken = first if source.marks.spoken is None else source.marks.spoken
    more.append(
        f"One of these tokens is that of the language the text is in; a `target_prefix` with that of another one is "
        f"what to translate into; known are {known}"
    )
    return ((spoken, *before), after) if source.marks.language == "before" else (before, (*after, spoken))
