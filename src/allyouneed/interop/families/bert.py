"""BERT (Devlin et al. 2019), and what its relatives share with it: `MODEL` and the tables after it for configs, `BODY`,
`normalize_names` and `restore_names` for weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allyouneed.interop.hf.config_reader import ConfigReader, Tree, is_headless
from allyouneed.interop.hf.config_table import ConfigTable, Conversion, Line
from allyouneed.interop.hf.config_writer import OMITTED, ModelTree
from allyouneed.interop.hf.position_offset import model_without_offset, without_offset
from allyouneed.interop.hf.transforms import untie_if_different
from allyouneed.interop.hf.weight_table import EquivalentModel, Family, HfConfig, TensorTransform, Weights

ANSWERS = "ForQuestionAnswering: span, "  # relatives whose class computes something else leave it out
MODEL = """
kind: encoder
vocab = vocab_size ?? 30522
width = hidden_size ?? 768
dropout = hidden_dropout_prob ?? 0.1
norm: {kind: layer}
norm.eps = layer_norm_eps ?? 1.0e-12
embed: {scale: none, norm: {kind: layer}}
embed.norm.eps <- layer_norm_eps
embed.tied = tie_word_embeddings ?? true
embed.types = type_vocab_size ?? 2
encoder.repeat = num_hidden_layers ?? 12
encoder.mixer: {kind: attention}
encoder.mixer.heads = num_attention_heads ?? 12
encoder.mixer.dropout = attention_probs_dropout_prob ?? 0.1
encoder.channel: {kind: ffn}
encoder.channel.hidden = intermediate_size ?? 3072
encoder.channel.activation = hidden_act ?? gelu |activation
head.kind = architectures |class [CLASS, {ForMaskedLM: vocabulary, ForSequenceClassification: classes,
    ForTokenClassification: tags, ForQuestionAnswering: span, ForPreTraining: vocabulary, Model: none}]
head<vocabulary>: {bias: true, transform: {norm: {kind: layer}}}
head<vocabulary>.transform.norm.eps <- layer_norm_eps
head<vocabulary>.transform.activation <- hidden_act |activation
ignore directionality, output_past, pooler_*
"""
HEADS = """
head<classes>.hidden: tanh
head<classes>.labels = id2label, label2id |labels
head<classes>.dropout = classifier_dropout |optional
head<tags>.labels = id2label, label2id |labels
head<tags>.dropout = classifier_dropout |optional
"""
LEARNED = """
embed.positions: {kind: learned}
embed.positions.length = max_position_embeddings ?? 512
position_embedding_type in [absolute]
"""
# the table starts with unused rows
OFFSET = """
embed.positions = max_position_embeddings, pad_token_id |offset
position_embedding_type in [absolute]
?? {max_position_embeddings: 512}
"""
NO_PRETRAINING = """
head.kind = architectures |class [CLASS, {ForMaskedLM: vocabulary, ForSequenceClassification: classes,
    ForTokenClassification: tags, ForQuestionAnswering: span, Model: none}]
"""


def read_offset(config: ConfigReader, line: Line) -> Tree:
    offset = config["pad_token_id"] + 1
    return {"kind": "learned", "length": config["max_position_embeddings"] - offset, "offset": offset}


def write_offset(ours: ModelTree, line: Line) -> Tree:
    offset = ours.get("embed.positions.offset", 0)
    found = {"max_position_embeddings": (ours["embed.positions.length"] or 0) + offset}
    return found | ({"pad_token_id": offset - 1} if offset else {})


def read_inner(config: ConfigReader, line: Line) -> Any:
    """The width of token vectors; null where it is the model's, but for ALBERT."""
    width, inner = config["hidden_size"], config.get(line.key)
    if line.argument != "always":
        inner = None if inner in (0, width) else inner
    if inner is not None and not config["tie_word_embeddings"]:
        config.problems.append(
            "tie_word_embeddings: False is not supported where embedding_size differs from hidden_size"
        )
    return inner


def read_pair(config: ConfigReader, line: Line) -> int | None:
    """The classes of sentence pairs; ALBERT's have the number of its labels."""
    if not (config.get("architectures") or [""])[0].endswith("ForPreTraining"):
        return None
    return len(config.get("id2label") or "01") if line.argument == "Albert" else 2


def write_pair(ours: ModelTree, line: Line) -> Any:
    return [f"{line.argument}ForPreTraining"] if ours.get(line.path) else OMITTED


CONVERSIONS = {
    "pair": Conversion(read_pair, write_pair),  # of classes with the head of sentence pairs
    "inner": Conversion(read_inner, lambda ours, line: ours.get(line.path, ours["width"])),
    "offset": Conversion(read_offset, write_offset),
}


BODY = """
embed.tokens.weight = bert.embeddings.word_embeddings.weight
embed.positions.weight = bert.embeddings.position_embeddings.weight
embed.types.weight = bert.embeddings.token_type_embeddings.weight
embed.norm.* = bert.embeddings.LayerNorm.*
encoder.blocks.{n}.sublayers.mixer.qkv.* = SELF.query.* + SELF.key.* + SELF.value.*
encoder.blocks.{n}.sublayers.mixer.out.* = bert.encoder.layer.{n}.attention.output.dense.*
encoder.blocks.{n}.sublayers.channel.up.* = bert.encoder.layer.{n}.intermediate.dense.*
encoder.blocks.{n}.sublayers.channel.down.* = bert.encoder.layer.{n}.output.dense.*
encoder.blocks.{n}.wiring.norms.0.* = bert.encoder.layer.{n}.attention.output.LayerNorm.*
encoder.blocks.{n}.wiring.norms.1.* = bert.encoder.layer.{n}.output.LayerNorm.*
head.ends.* = qa_outputs.*
""".replace("SELF", "bert.encoder.layer.{n}.attention.self")

HEAD = """
head.weight = cls.predictions.decoder.weight
head.bias = cls.predictions.bias
head.transform.linear.* = cls.predictions.transform.dense.*
head.transform.norm.* = cls.predictions.transform.LayerNorm.*
"""

CLASSES = """
head.classes.* = classifier.out_proj.*
head.hidden.* = classifier.dense.*
head.tags.* = classifier.*
"""


def body(config: HfConfig) -> str:
    """The prefix of the encoder in files of a model with a head."""
    return {"big_bird": "bert."}.get(config["model_type"], f"{config['model_type']}.")


def tied(config: HfConfig) -> bool:
    return bool(config.get("tie_word_embeddings", True))


def normalize_names(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Old files name a norm's weight `gamma` and its bias `beta`; those of a headless model omit the prefix. An untied
    head has two biases and uses the second, which old files omit."""
    prefix = "" if any(name.startswith(body(config)) for name in weights) else body(config)
    old = {".gamma": ".weight", ".beta": ".bias"}
    named = {prefix + re.sub(r"\.(gamma|beta)$", lambda end: old[end[0]], name): w for name, w in weights.items()}
    tokens = f"{body(config)}embeddings.word_embeddings.weight"
    heads = [name for name in named if name.endswith((".decoder.weight", "_lm_head.weight", "vocab_projector.weight"))]
    for head in heads:
        config = untie_if_different(config, named, head, tokens)
    if not tied(config):
        first = {name.replace(".decoder.weight", ""): name for name in heads if name.endswith(".decoder.weight")}
        named = {f"{name}.decoder.bias": named[f"{name}.bias"] for name in first if f"{name}.bias" in named} | named
    return config, named


def restore_names(pooler: Mapping[str, str]) -> Callable[[HfConfig, Weights], tuple[HfConfig, Weights]]:
    """Inverse of `normalize_names`. `pooler`: end of a class name -> the pooler that class requires; ours has none, so
    it is written as zeros."""

    def restore(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
        found = {**weights}
        for name in [name for name in found if name.endswith(".decoder.bias")]:
            found.setdefault(name.replace(".decoder.bias", ".bias"), found[name].clone())
        architecture = (config.get("architectures") or [""])[0]
        width, like = config.get("hidden_size", 0), next(iter(weights.values()))
        for end, name in pooler.items():
            if architecture.endswith(end) and f"{name}.weight" not in found:
                found |= {f"{name}.weight": like.new_zeros(width, width), f"{name}.bias": like.new_zeros(width)}
        if is_headless(config):
            found = {name.removeprefix(body(config)): tensor for name, tensor in found.items()}
        return config, found

    return restore


def untied_bias(lines: str, head: str) -> Callable[[HfConfig], str]:
    """The table of a family whose untied head (under `head`) uses the second of its two biases."""
    other = lines.replace(f"head.bias = {head}.bias", f"head.bias = {head}.decoder.bias")
    return lambda config: lines if tied(config) else other


IGNORED_WEIGHTS = ("*.position_ids", "cls.predictions.decoder.*")  # buffers and copies of tied matrices
PRESERVED_WEIGHTS = ("*.pooler.*", "cls.seq_relationship.*", "cls.predictions.bias")  # used by other heads only


def family(
    name: str,
    prefix: str,
    fields: str,
    lines: str | Callable[[HfConfig], str],
    conversions: Mapping[str, Conversion] | None = None,
    poolers: Mapping[str, str] | None = None,
    ignore: Sequence[str] = IGNORED_WEIGHTS,
    preserve: Sequence[str] = PRESERVED_WEIGHTS,
    **other: Any,
) -> Family:
    """A relative; `prefix`: that of its classes; `poolers`: see `restore_names`."""
    table = ConfigTable(fields.replace("CLASS", prefix), {**CONVERSIONS, **(conversions or {})})
    steps: dict[str, Any] = {"prepare": normalize_names, "finish": restore_names(poolers or {})}
    return Family(name, table, lines, ignore, preserve=preserve, **(steps | other))


POSITION_FIELDS = """
embed.positions = position_embedding_type, max_position_embeddings |absolute
encoder.mixer.positions = position_embedding_type, max_position_embeddings |relative
uniem_embedding_strategy in [last_mean]
?? {max_position_embeddings: 512}
"""
FIELDS = POSITION_FIELDS + MODEL + HEADS + "head<vocabulary>.pair = architectures |pair Bert\n"
# the last is a key of M3E: mean pooling, as ours
RELATIVE_TERMS = {"absolute": None, "relative_key": "key", "relative_key_query": "key-query"}


def read_absolute(config: ConfigReader, line: Line) -> Tree:
    if config.map_value("position_embedding_type", RELATIVE_TERMS, "absolute") is not None:
        return {"kind": "none"}
    return {"kind": "learned", "length": config["max_position_embeddings"]}


def read_relative(config: ConfigReader, line: Line) -> Tree | object:
    """Shaw's positions in every layer, a vector for each distance that can occur, and none in the embedding."""
    terms = RELATIVE_TERMS.get(config.get("position_embedding_type", "absolute"))
    distance = config["max_position_embeddings"] - 1
    return {"kind": "shaw", "distance": distance, "values": False, "terms": terms} if terms else OMITTED


def write_relative(ours: ModelTree, line: Line) -> Tree:
    if ours.get(f"{line.path}.kind") != "shaw":
        return {}
    names = {terms: name for name, terms in RELATIVE_TERMS.items()}
    return {
        "position_embedding_type": names.get(ours[f"{line.path}.terms"]),
        "max_position_embeddings": ours[f"{line.path}.distance"] + 1,
    }


def write_absolute(ours: ModelTree, line: Line) -> Tree:
    return {} if ours.get("encoder.mixer.positions.kind") == "shaw" else write_offset(ours, line)


POSITIONS = {
    "absolute": Conversion(read_absolute, write_absolute),
    "relative": Conversion(read_relative, write_relative),
}
POOLER = """
encoder.blocks.{n}.sublayers.mixer.relative.keys_table.weight = DISTANCES |reversed
head.pooler.* = bert.pooler.dense.*
head.pair.* = cls.seq_relationship.*
head.hidden.* = bert.pooler.dense.*
head.classes.* = classifier.*
head.tags.* = classifier.*
"""
DISTANCES = "bert.encoder.layer.{n}.attention.self.distance_embedding.weight"  # query minus key; ours: key minus query
REVERSED = TensorTransform(lambda table, config: table.flip(0), lambda table, config: table.flip(0))
FAMILY = family(
    "bert",
    "Bert",
    FIELDS,
    untied_bias(BODY + HEAD + POOLER.replace("DISTANCES", DISTANCES), "cls.predictions"),
    POSITIONS,
    {"BertModel": "bert.pooler.dense"},
    preserve=(*PRESERVED_WEIGHTS, "bert.embeddings.position_embeddings.weight"),  # stored beside relative positions
    transforms={"reversed": REVERSED},
    equivalent=EquivalentModel(without_offset, model_without_offset),
)
