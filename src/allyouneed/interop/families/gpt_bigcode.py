"""StarCoder and SantaCoder (Li et al. 2023; Ben Allal et al. 2023): GPT-2 with one key for all heads."""

from __future__ import annotations

from allyouneed.interop.families import gpt2
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.transforms import chained, grouping, own_head, prefixed, unprefixed
from allyouneed.interop.hf.weight_table import Family, Theirs

# how to be quick in half precision; the number of keys is what multi_query says
HARMLESS = ("*softmax_in_fp32", "max_*", "num_key_value_heads", "pad_key_length", "pre_*", "validate_runner_input")


@reading(*gpt2.HARMLESS, *HARMLESS)
def tree(config: Reader) -> Tree:
    heads = 1 if config.get("multi_query", True) else config["n_head"]
    return gpt2.decoder(config, [(gpt2.attention(config, kv_heads=heads), config["n_layer"])])


def counts(config: Theirs) -> tuple[int, int]:
    """Without multi-query attention each head's query, key and value stand together; with it there is one group."""
    return config["n_head"], 1 if config.get("multi_query", True) else config["n_head"]


LINES = gpt2.LINES.replace(" |T", "").replace("attn.c_attn.weight", "attn.c_attn.weight |apart")
LINES = LINES.replace("attn.c_attn.bias", "attn.c_attn.bias |apart")


def back(said: Said) -> Theirs:
    return {
        "architectures": said.writer("GPTBigCodeForCausalLM"),
        **gpt2.sizes(said),
        "activation_function": said.activation("decoder.channel.activation", tanh="gelu_pytorch_tanh"),
        "n_positions": said["embed.positions.length"],
        "multi_query": said.get("decoder.mixer.kv_heads") == 1,
        "scale_attn_weights": gpt2.scores(said)["scale_attn_weights"],
    }


FAMILY = Family(
    "gpt_bigcode",
    tree,
    LINES,
    gpt2.IGNORE,
    changes={"apart": grouping(counts)},
    before=chained(prefixed("transformer."), own_head("lm_head.weight", "transformer.wte.weight")),
    back=back,
    after=unprefixed("transformer."),
)
