"""BigBird (Zaheer et al. 2020): BERT whose attention is sparse. What is read computes what transformers computes when
it does not train; see nn/mixers/attention/big_bird.py for how that differs from the paper."""

from __future__ import annotations

from allyouneed.interop.families.bert import (
    BODY,
    CLASSES,
    DEFAULTS,
    HARMLESS,
    HEAD,
    IGNORE,
    SPARE,
    encoder,
    head,
    learned,
    named_back,
    places,
    renamed,
    untied_bias,
    words,
)
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family

OTHERS = {
    "vocab_size": 50358,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 4096,
    "block_size": 64,
    "num_random_blocks": 3,
    "use_bias": True,
}


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS | OTHERS)
    bias = config["use_bias"]
    sparse = {"kind": "big-bird", "block": config["block_size"], "random": config["num_random_blocks"], "bias": bias}
    whole = {"bias": {"q": bias, "k": bias, "v": bias}}
    mixer = config.choose("attention_type", {"block_sparse": sparse, "original_full": whole}, "block_sparse")
    found = encoder(config, learned(config), mixer)
    found["embed"]["scale"] = "sqrt-width" if config.get("rescale_embeddings", False) else "none"
    return found | {"head": head(config, found["head"], config.activation("hidden_act"), ForPreTraining=found["head"])}


def back(said: Said) -> Tree:
    found = words(said, "BigBird") | places(said) | {"rescale_embeddings": said["embed.scale"] == "sqrt-width"}
    bias = said.get("encoder.mixer.bias")
    if said["encoder.mixer.kind"] == "attention":
        return found | {"attention_type": "original_full", "use_bias": bias if isinstance(bias, bool) else bias["q"]}
    sparse = {"block_size": said["encoder.mixer.block"], "num_random_blocks": said["encoder.mixer.random"]}
    return found | sparse | {"attention_type": "block_sparse", "use_bias": bias}


UNDONE = named_back({"": "bert.pooler"})  # all of their classes have one
FAMILY = Family(
    "big_bird",
    tree,
    untied_bias(BODY + HEAD + CLASSES, "cls.predictions"),
    IGNORE,
    before=renamed,
    spare=SPARE,
    back=back,
    after=UNDONE,
)
