"""Write a CTranslate2 folder: model.bin, config.json, vocabularies, and a README with example code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.data.tokenizers.plain import unknown_id
from allyouneed.errors import UserError
from allyouneed.errors.extras import require
from allyouneed.folder import CARD, Folder
from allyouneed.interop.ctranslate2.folder import OURS
from allyouneed.interop.ctranslate2.readme import inner_of, readme
from allyouneed.interop.ctranslate2.spec import fill_audio_encoder, fill_stack, switches
from allyouneed.interop.ctranslate2.support import check, kind_of
from allyouneed.interop.hf.config_reader import Tree

POSITIONS = 1024  # CTranslate2's default input limit
SECONDS, POSITIONS_PER_SECOND = 30.0, 50  # Whisper's window
SPECS = {
    "encoder-decoder": "TransformerSpec",
    "decoder": "TransformerDecoderModelSpec",
    "encoder": "TransformerEncoderModelSpec",
}
OWN_FILES = ("config.json", CARD)  # written by CTranslate2 itself


def write(folder: Folder, out: Path) -> list[str]:
    """Write a CTranslate2 folder into `out`, which is empty. Returns notes."""
    require("ctranslate2", "--to ctranslate2")
    where = folder.path or "the model"
    notes: list[str] = []
    try:
        tree = check(folder.model)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    spec = build_whisper_spec(folder, tree) if kind_of(tree) == "sound" else build_spec(folder, tree, notes)
    spec.config.add_attribute("layer_norm_epsilon", tree["norm"]["eps"])
    for key, value in token_config(folder, tree).items():
        setattr(spec.config, key, value)
    spec.config.add_attribute(OURS, own_settings(folder))
    spec.validate()
    spec.optimize()
    spec.save(str(out))
    write_tokenizers(folder, out)
    (out / CARD).write_text(readme(folder, kind_of(tree)), encoding="utf-8")
    return notes


def build_spec(folder: Folder, tree: Tree, notes: list[str]) -> Any:
    """The spec with all its weights and vocabularies."""
    from ctranslate2.specs import common_spec, transformer_spec

    model: Any = folder.model
    positions = max(POSITIONS, 2 * folder.max_tokens)
    stacks = []
    if "encoder" in tree:
        embed = getattr(model, "source_embed", None) or model.embed
        options = switches(tree, "encoder")
        if embed.types is not None:
            options |= {"num_source_embeddings": 2, "embeddings_merge": common_spec.EmbeddingsMerge.ADD}
        stacks.append(transformer_spec.TransformerEncoderSpec(**options))
        fill_stack(stacks[-1], model.encoder, embed, positions)
    if "decoder" in tree:
        stacks.append(transformer_spec.TransformerDecoderSpec(**switches(tree, "decoder")))
        fill_stack(stacks[-1], model.decoder, model.embed, positions)
        fill_head(stacks[-1], model.head)
    if model.config.limit is None and any(hasattr(stack, "position_encodings") for stack in stacks):
        notes.append(f"position encodings are stored for {positions} tokens; CTranslate2 refuses longer texts")
    spec = getattr(transformer_spec, SPECS[tree["kind"]])(*stacks)
    sizes, vocabs = model.config.vocabs, folder.tokenizers
    if len(stacks) == 2:
        spec.register_source_vocabulary(vocabulary(vocabs.source, sizes.source))
        spec.register_target_vocabulary(vocabulary(vocabs.target, sizes.target))
    else:
        spec.register_vocabulary(vocabulary(vocabs.target, sizes.target))
    return spec


def build_whisper_spec(folder: Folder, tree: Tree) -> Any:
    """The spec of a Whisper model; its decoder is configurable, its encoder is not."""
    from ctranslate2.specs import transformer_spec, whisper_spec

    if "lacks" in folder.task:
        raise UserError(f"{folder.path or 'the model'}: {folder.task['lacks']}")
    model: Any = folder.model
    encoder, decoder = switches(tree, "encoder"), switches(tree, "decoder")
    spec = whisper_spec.WhisperSpec(*(side[key] for side in (encoder, decoder) for key in ("num_layers", "num_heads")))
    spec.decoder = transformer_spec.TransformerDecoderSpec(**decoder)
    positions = round(folder.task.get("seconds", SECONDS) * POSITIONS_PER_SECOND)
    fill_audio_encoder(spec.encoder, model.encoder, model.source_embed, positions)
    fill_stack(spec.decoder, model.decoder, model.embed, POSITIONS)
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


# --- vocabularies -----------------------------------------------------------------------------------------------------


def vocabulary(tokenizer: Tokenizer, size: int) -> list[str]:
    """Token strings by id; rows of the model without a token get placeholder names.

    Pieces of the tokenizer that the model does not have are left out: CTranslate2 maps them to unknown.
    """
    inner, known = inner_of(tokenizer), tokenizer.about["known"]
    valid = [number for number in range(size) if known is None or number < known or number in tokenizer.added]
    names: dict[int, str] = {number: name for number in valid if (name := inner.id_to_token(number)) is not None}
    taken = set(names.values())
    for number in range(size):
        if number not in names:
            names[number] = f"<no token {number}>" + ">" * sum(f"<no token {number}>" in name for name in taken)
    return [names[number] for number in range(size)]


def token_config(folder: Folder, tree: Tree) -> dict[str, Any]:
    """Special tokens by role. A byte-level tokenizer has no unknown token, but CTranslate2 requires one."""
    target, inner, task = folder.tokenizers.target, inner_of(folder.tokenizers.target), folder.task
    if kind_of(tree) == "sound":
        layers, heads = (switches(tree, "decoder")[key] for key in ("num_layers", "num_heads"))
        generation = folder.origin.get("generation", {})
        # without known alignment heads, use all heads of the upper half of the layers
        upper = [[layer, head] for layer in range(layers // 2, layers) for head in range(heads)]
        return {
            "suppress_ids": task.get("suppress", []),
            "suppress_ids_begin": task.get("begin_suppress", []),
            "lang_ids": sorted(task.get("languages", {}).values()),
            "alignment_heads": generation.get("alignment_heads") or upper,
        }
    unk = unknown_id(inner)
    found = {"bos": target.bos, "eos": target.eos, "unk": target.pad if unk is None else unk}
    if tree["kind"] == "encoder-decoder":
        found["decoder_start"] = target.opening[0]
    return {f"{role}_token": inner.id_to_token(number) for role, number in found.items()}


def own_settings(folder: Folder) -> dict[str, Any]:
    """What CTranslate2 ignores and reading the folder again needs."""
    return {"task": folder.task, "directions": folder.directions, "max_tokens": folder.max_tokens, "tokenizer": OURS}


def write_tokenizers(folder: Folder, out: Path) -> None:
    """Write tokenizer.json and the original tokenizer files."""
    folder.tokenizers.save(out)
    for name, content in folder.originals.items():
        if name not in OWN_FILES and not (out / name).exists():
            (out / name).write_bytes(content)
