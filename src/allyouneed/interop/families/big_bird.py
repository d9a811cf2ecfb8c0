"""BigBird (Zaheer et al. 2020): BERT with block-sparse attention. The imported model computes what transformers
computes in eval mode; nn/mixers/attention/big_bird.py explains how that differs from the paper."""

from __future__ import annotations

from allyouneed.interop.families import bert
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family

OWN_DEFAULTS = {
    "vocab_size": 50358,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 4096,
    "block_size": 64,
    "num_random_blocks": 3,
    "use_bias": True,
}


@strict_config(*bert.IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(bert.DEFAULTS | OWN_DEFAULTS)
    bias = config["use_bias"]
    sparse = {"kind": "big-bird", "block": config["block_size"], "random": config["num_random_blocks"], "bias": bias}
    full = {"bias": {"q": bias, "k": bias, "v": bias}}
    mixer = config.map_value("attention_type", {"block_sparse": sparse, "original_full": full}, "block_sparse")
    found = bert.encoder(config, bert.learned(config), mixer)
    found["embed"]["scale"] = "sqrt-width" if config.get("rescale_embeddings", False) else "none"
    return found | {
        "head": bert.head(config, found["head"], config.activation("hidden_act"), ForPreTraining=found["head"])
    }


def hf_config(ours: ModelTree) -> Tree:
    found = (
        bert.config_fields(ours, "BigBird")
        | bert.position_fields(ours)
        | {"rescale_embeddings": ours["embed.scale"] == "sqrt-width"}
    )
    bias = ours.get("encoder.mixer.bias")
    if ours["encoder.mixer.kind"] == "attention":
        return found | {"attention_type": "original_full", "use_bias": bias if isinstance(bias, bool) else bias["q"]}
    sparse = {"block_size": ours["encoder.mixer.block"], "num_random_blocks": ours["encoder.mixer.random"]}
    return found | sparse | {"attention_type": "block_sparse", "use_bias": bias}


FINISH = bert.restore_names({"": "bert.pooler"})  # all of their classes have a pooler
FAMILY = Family(
    "big_bird",
    tree,
    bert.untied_bias(bert.BODY + bert.HEAD + bert.CLASSES, "cls.predictions"),
    bert.IGNORED_WEIGHTS,
    prepare=bert.normalize_names,
    preserve=bert.PRESERVED_WEIGHTS,
    hf_config=hf_config,
    finish=FINISH,
)
