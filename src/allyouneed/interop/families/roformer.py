"""RoFormer (Su et al. 2021): BERT whose queries and keys are turned by their places, in pairs of neighbours."""

from __future__ import annotations

from allyouneed.interop.families.bert import BODY, CLASSES, DEFAULTS, HARMLESS, HEAD, IGNORE, encoder, head, renamed
from allyouneed.interop.reader import Reader, Tree, reading
from allyouneed.interop.table import Family


def narrower(config: Reader) -> int | None:
    """The width of token vectors, where it is not the model's."""
    inner: int = config.get("embedding_size") or config["hidden_size"]
    return None if inner == config["hidden_size"] else inner


@reading(*HARMLESS, "max_position_embeddings")  # places go on after it
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS | {"vocab_size": 50000})
    rotary = {"kind": "rotary", "order": "interleaved", "values": config.get("rotary_value", False)}
    found = encoder(config, {"kind": "none"}, {"positions": rotary}, narrower(config))
    return found | {"head": head(config, found["head"], config.activation("hidden_act"))}


LINES = BODY.replace("bert.", "roformer.") + HEAD + CLASSES + "embed.widen.* = roformer.embeddings_project.*"
FAMILY = Family("roformer", tree, LINES, (*IGNORE, "roformer.encoder.embed_positions.weight"), before=renamed)
