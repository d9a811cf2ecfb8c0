"""Translation models of fairseq (Ott et al. 2019): `checkpoint_best.pt` with options and weights, `dict.de.txt` and
`dict.en.txt` with the vocabularies, and SentencePiece models or merges beside them.

Names and options are those of `fairseq/models/transformer`; files of old versions, which fairseq renames when it loads
them, are renamed here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from allyouneed.data.tokenizers.bounds import MAX_BYTES
from allyouneed.errors import UserError
from allyouneed.files.reading import file_in, has_file, read_text
from allyouneed.folder import Folder
from allyouneed.interop.families.bart import CONVERSIONS, LINES, MODEL, PRESERVED_WEIGHTS, TRANSFORMS, prepare
from allyouneed.interop.heads import config_of
from allyouneed.interop.hf.checkpoint import plain_tensors
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_table import ConfigTable, assign
from allyouneed.interop.hf.weight_table import Family
from allyouneed.interop.malformed import malformed
from allyouneed.interop.tokenizers import subword_files
from allyouneed.interop.tokenizers.subword_files import Roles

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
BOS, PAD, EOS, UNK = range(4)
SIDES = ("encoder", "decoder")
OFFSET = PAD + 1  # positions are counted from here
DEFAULT_LENGTH = 1024
# options with an effect on the model, and their defaults (base_architecture)
DEFAULTS: dict[str, Any] = {
    "encoder_embed_dim": 512, "encoder_ffn_embed_dim": 2048, "encoder_layers": 6, "encoder_attention_heads": 8,
    "encoder_normalize_before": False, "encoder_learned_pos": False, "decoder_layers": 6, "decoder_attention_heads": 8,
    "decoder_normalize_before": False, "decoder_learned_pos": False, "activation_fn": "relu", "dropout": 0.1,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "no_scale_embedding": False, "layernorm_embedding": False,
    "no_token_positional_embeddings": False, "max_source_positions": 1024, "max_target_positions": 1024,
}  # fmt: skip
OFF = (
    "adaptive_softmax_cutoff", "adaptive_input", "no_cross_attention", "cross_self_attention", "char_inputs",
    "base_layers", "character_embeddings", "encoder_layers_to_keep", "decoder_layers_to_keep", "merge_src_tgt_embed",
    "lang_tok_replacing_bos_eos",
)  # fmt: skip
ARCHITECTURES = ("transformer", "bart", "vaswani", "iwslt")  # how names of those that are this model begin
OTHERS = ("transformer_lm", "transformer_from", "transformer_moe", "transformer_pointer", "transformer_monotonic")
MULTILINGUAL = ("multilingual_translation", "translation_multi_simple_epoch", "translation_from_pretrained_bart")
OLD_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}


def is_fairseq(content: Any) -> bool:
    return isinstance(content, Mapping) and "model" in content and bool({"args", "cfg"} & set(content))


def read(content: Mapping[str, Any], path: Path, tokenizer: Path | None = None) -> Folder:
    """`tokenizer`: a subword file, by default the one beside the model."""
    options = read_options(content, path)
    weights = plain_tensors(content["model"], path)
    try:
        with malformed("not a valid fairseq model"):
            config, renamed = to_bart(options, weights)
            model = FAMILY.convert(config, renamed)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    sizes: Any = config_of(model).vocabs
    languages = [options.get("source_lang"), options.get("target_lang")]
    names = [name if isinstance(name, str) else None for name in languages]
    sides = read_dictionaries(path, names, (sizes.source, sizes.target))
    vocabs, notes = None, [f"{path}: no dict.*.txt beside it, so it takes token ids, not texts"]
    if sides is not None:
        roles = Roles(SPECIALS[UNK], EOS, EOS, PAD, after=(EOS,), never=(PAD, BOS))
        moses = options.get("tokenizer") == "moses"
        vocabs, notes = subword_files.read(path.parent, sides, roles, tokenizer, names, moses)
    lengths = [options.get(f"max_{side}_positions") for side in ("source", "target")]
    longest = min((n for n in lengths if type(n) is int and n > 0), default=DEFAULT_LENGTH)
    folder = Folder(model, vocabs, {"kind": "translation"}, max_tokens=longest)
    folder.directions = [(names[0], names[1])] if names[0] and names[1] else []
    folder.path, folder.notes = path, notes
    kept = {key: value for key, value in options.items() if value and isinstance(value, str | int | float)}
    folder.origin = {"format": "fairseq", "settings": kept}
    return folder


def read_options(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The options of model and task in one mapping: a Namespace, or, in newer files, a tree."""
    found: dict[str, Any] = {}
    for tree in (content.get("cfg"), content.get("args")):
        tree = vars(tree) if isinstance(tree, argparse.Namespace) else tree
        if not isinstance(tree, Mapping):
            continue
        parts = [tree.get("bpe"), tree.get("tokenizer"), tree.get("task"), tree.get("model")]
        nested = [vars(part) if isinstance(part, argparse.Namespace) else part for part in parts]
        if any(isinstance(part, Mapping) for part in nested):
            for name, part in zip(("bpe", "tokenizer", "task", "arch"), nested, strict=True):
                if isinstance(part, Mapping):
                    found |= {str(key): value for key, value in _flat(part) if value is not None}
                    found[name] = part.get("_name") or part.get("arch") or found.get(name)
        else:
            found |= {str(key): value for key, value in tree.items() if value is not None}
    if not found:
        raise UserError(f"{path}: not a model of fairseq: no options")
    return found


def _flat(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """`encoder: {embed_dim: …}` as `encoder_embed_dim`."""
    found = []
    for key, value in tree.items():
        inner = isinstance(value, Mapping) and key in SIDES
        found += [(f"{key}_{name}", one) for name, one in value.items()] if inner else [(key, value)]
    return found


# --- weights ----------------------------------------------------------------------------------------------------------


def to_bart(options: Mapping[str, Any], weights: Mapping[str, Tensor]) -> tuple[Tree, dict[str, Tensor]]:
    """Options and weights by the names of BART, whose layers these are."""
    found = upgrade(weights)
    config: Tree = {key: options.get(key, default) for key, default in DEFAULTS.items()}
    config |= {
        key: options.get(key, config[f"encoder{key[7:]}"]) for key in ("decoder_embed_dim", "decoder_ffn_embed_dim")
    }
    config |= {
        key: options.get(key, config["decoder_embed_dim"]) for key in ("decoder_input_dim", "decoder_output_dim")
    }
    config |= {key: options.get(key) for key in OFF} | {"arch": str(options.get("arch", "transformer"))}
    config["task"] = options.get("task", "translation")
    for side in SIDES:
        final = f"model.{side}.layer_norm.weight"
        versions = weights.get(f"{side}.version")
        if versions is not None and versions.numel() == 1 and float(versions) <= 2:  # such files never used it
            found = {name: tensor for name, tensor in found.items() if not name.startswith(f"model.{side}.layer_norm.")}
        config[f"{side}_final_norm"] = final in found
    config["vocab_size"] = len(found["model.encoder.embed_tokens.weight"])
    config["decoder_vocab_size"] = len(found["model.decoder.embed_tokens.weight"])
    config["model_type"] = "fairseq"
    full, named = prepare(config | {"tie_word_embeddings": "lm_head.weight" not in found}, found)
    return dict(full), dict(named)


def upgrade(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Today's names for those of older versions; buffers are dropped."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.endswith(("version", "._float_tensor", "embed_positions.weights")) or "classification_heads" in name:
            continue
        name = re.sub(
            r"^(encoder|decoder)(.*)\.layer_norms\.(\d)\.",
            lambda match: f"{match[1]}{match[2]}.{OLD_NORMS[match[1]][int(match[3])]}.",
            name,
        )
        if match := re.fullmatch(r"(.+)\.in_proj_(weight|bias)", name):
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                found[f"model.{match[1]}.{part}_proj.{match[2]}"] = piece
        elif name in ("decoder.embed_out", "decoder.output_projection.weight"):
            found["lm_head.weight"] = tensor
        else:
            found[f"model.{name}"] = tensor
    return found


@strict_config("task", "max_*_positions", "decoder_ffn_embed_dim")
def tree(config: ConfigReader) -> Tree:
    arch, task = config["arch"], config["task"]
    if not arch.startswith(ARCHITECTURES) or arch.startswith(OTHERS):
        config.problems.append(f"arch: {arch!r} is not supported (allowed: transformer and its sizes, bart)")
    if task in MULTILINGUAL:
        config.problems.append(f"task: {task!r}, with language tokens that no file names, is not supported")
    config.refuse_set(*OFF)
    for key in ("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"):
        config.require(key, config["encoder_embed_dim"])
    config.require("decoder_learned_pos", config["encoder_learned_pos"])
    before = config["encoder_normalize_before"]
    config.require("decoder_normalize_before", before)
    finals = [config[f"{side}_final_norm"] for side in SIDES]
    if finals[0] != finals[1] or (finals[0] and not before):
        config.problems.append("a final norm on one side only is not supported")
    positions: Tree = {"kind": "sinusoidal", "order": "halves", "closed": True, "offset": OFFSET}
    if config["encoder_learned_pos"]:
        length = min(config["max_source_positions"], config["max_target_positions"])
        positions = {"kind": "learned", "length": length, "offset": OFFSET}
    if config["no_token_positional_embeddings"]:
        positions = {"kind": "none"}
    names = {f"{side}_ffn_dim": config[f"{side}_ffn_embed_dim"] for side in SIDES}
    names |= {"d_model": config["encoder_embed_dim"], "activation_function": config["activation_fn"]}
    names |= {"scale_embedding": not config["no_scale_embedding"], "share_encoder_decoder_embeddings": True}
    config.set_defaults(names)
    tree = ConfigTable(MODEL, CONVERSIONS).read_lines(config)
    tree["embed"] |= {"positions": positions, "norm": {"kind": "layer"} if config["layernorm_embedding"] else None}
    if config["layernorm_embedding"] or positions["kind"] == "learned":  # one for each side
        tree["source_embed"] = tree["embed"]
    for side in SIDES:
        assign(tree, f"{side}.wiring", {"kind": "pre-norm", "final": finals[0]} if before else "post-norm")
    return tree


FAMILY = Family("fairseq", tree, LINES, ("lm_head.weight",), TRANSFORMS, None, PRESERVED_WEIGHTS)


# --- vocabularies -----------------------------------------------------------------------------------------------------


def read_dictionaries(
    path: Path, languages: list[str | None], rows: tuple[int, int]
) -> tuple[dict[str, int], dict[str, int]] | None:
    """Token -> id of source and target: dict.LANGUAGE.txt, or one dict.txt for both."""
    folder, sides = path.parent, []
    files = sorted(file.name for file in folder.glob("dict.*txt") if file.is_file())
    for language, count in zip(languages, rows, strict=True):
        wanted = [f"dict.{language}.txt", "dict.txt"] if language else ["dict.txt"]
        name = next((name for name in wanted if has_file(folder, name)), files[0] if len(files) == 1 else None)
        if name is None and files:
            raise UserError(f"{path}: no {wanted[0]} beside it, but {', '.join(files)}; rename them by language")
        if name is None:
            return None
        ids = read_dictionary(file_in(folder, name))
        if len(ids) > count:
            raise UserError(f"{folder / name}: {len(ids):,} tokens, but the model has {count:,}")
        sides.append(ids)
    return sides[0], sides[1]


def read_dictionary(file: Path) -> dict[str, int]:
    """Each line is a token and its count, after four special tokens."""
    tokens = list(SPECIALS)
    for number, line in enumerate(read_text(file.parent, file.name, MAX_BYTES).split("\n"), 1):
        if not line.strip():
            continue
        token, _, count = line.rstrip("\r").removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not token or not count.isdigit():
            raise UserError(f"{file}:{number}: expected a token and its count")
        tokens.append(token)
    return {token: number for number, token in reversed(list(enumerate(tokens)))}
