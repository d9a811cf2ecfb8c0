"""A model folder as CTranslate2 runs it: model.bin, config.json, vocabularies, and a README on how to call it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.data.tokenizers.plain import unknown_id
from allyouneed.errors import UserError
from allyouneed.folder import CARD, Folder
from allyouneed.interop.ctranslate2.readme import inner_of, readme
from allyouneed.interop.ctranslate2.spec import fill_hearing, fill_stack, switches
from allyouneed.interop.ctranslate2.support import checked, kind_of
from allyouneed.interop.hf.config_reader import Tree

PLACES = 1024  # as long a text as CTranslate2 reads unless told otherwise
SECONDS, PLACES_A_SECOND = 30.0, 50  # that a Whisper hears at once
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
    notes: list[str] = []
    try:
        tree = checked(folder.model)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    spec = hearing(folder, tree) if kind_of(tree) == "sound" else made(folder, tree, notes)
    spec.config.add_attribute("layer_norm_epsilon", tree["norm"]["eps"])
    for key, value in told(folder, tree).items():
        setattr(spec.config, key, value)
    spec.validate()
    spec.optimize()
    spec.save(str(out))
    write_words(folder, out)
    (out / CARD).write_text(readme(folder, kind_of(tree)), encoding="utf-8")
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


def hearing(folder: Folder, tree: Tree) -> Any:
    """A Whisper; its decoder has all the switches, its encoder none."""
    from ctranslate2.specs import transformer_spec, whisper_spec

    if "lacks" in folder.task:
        raise UserError(f"{folder.path or 'the model'}: {folder.task['lacks']}")
    model: Any = folder.model
    read, write = switches(tree, "encoder"), switches(tree, "decoder")
    spec = whisper_spec.WhisperSpec(*(side[key] for side in (read, write) for key in ("num_layers", "num_heads")))
    spec.decoder = transformer_spec.TransformerDecoderSpec(**write)
    places = round(folder.task.get("seconds", SECONDS) * PLACES_A_SECOND)
    fill_hearing(spec.encoder, model.encoder, model.source_embed, places)
    fill_stack(spec.decoder, model.decoder, model.embed, PLACES)
    fill_head(spec.decoder, model.head)
    spec.register_vocabulary(vocabulary(folder.tokenizers.target, model.config.vocabs.target))
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
    """Every token by the name its own tokenizer has for it; rows of the model that no token has get names too.

    Pieces that the tokenizer knows and the model does not are not among them: CTranslate2 takes them for unknown.
    """
    inner, known = inner_of(tokenizer), tokenizer.about["known"]
    said = [number for number in range(size) if known is None or number < known or number in tokenizer.added]
    names: dict[int, str] = {number: name for number in said if (name := inner.id_to_token(number)) is not None}
    taken = set(names.values())
    for number in range(size):
        if number not in names:
            names[number] = f"<no token {number}>" + ">" * sum(f"<no token {number}>" in name for name in taken)
    return [names[number] for number in range(size)]


def told(folder: Folder, tree: Tree) -> dict[str, Any]:
    """Which tokens do what. Tokenizers over bytes know every text and need no unknown token, but there must be one."""
    target, inner, task = folder.tokenizers.target, inner_of(folder.tokenizers.target), folder.task
    if kind_of(tree) == "sound":
        layers, heads = (switches(tree, "decoder")[key] for key in ("num_layers", "num_heads"))
        generation = folder.origin.get("generation", {})
        # which heads tell where a word was heard: those of the upper half, where nobody has looked closer
        upper = [[layer, head] for layer in range(layers // 2, layers) for head in range(heads)]
        return {
            "suppress_ids": task.get("suppress", []),
            "suppress_ids_begin": task.get("begin_suppress", []),
            "lang_ids": sorted(task.get("languages", {}).values()),
            "alignment_heads": generation.get("alignment_heads") or upper,
        }
    strange = unknown_id(inner)
    found = {"bos": target.bos, "eos": target.eos, "unk": target.pad if strange is None else strange}
    if tree["kind"] == "encoder-decoder":
        found["decoder_start"] = target.opening[0]
    return {f"{role}_token": inner.id_to_token(number) for role, number in found.items()}


def write_words(folder: Folder, out: Path) -> None:
    """tokenizer.json, and the files that it came with."""
    words = folder.tokenizers
    inner_of(words.source).save(str(out / "tokenizer.json"))
    if words.source.text != words.target.text:
        inner_of(words.target).save(str(out / "tokenizer.target.json"))
    for name, content in folder.originals.items():
        if name not in OWN_FILES and not (out / name).exists():
            (out / name).write_bytes(content)
