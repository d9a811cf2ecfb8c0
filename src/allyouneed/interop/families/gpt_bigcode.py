"""StarCoder and SantaCoder (Li et al. 2023; Ben Allal et al. 2023): GPT-2 with multi-query attention."""

from __future__ import annotations

from allyouneed.interop.families import gpt2
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import grouped_qkv
from allyouneed.interop.hf.weight_table import Family, HfConfig

# half-precision speed options; multi_query sets the number of key-value heads
IGNORED_KEYS = ("*softmax_in_fp32", "max_*", "num_key_value_heads", "pad_key_length", "pre_*", "validate_runner_input")


@strict_config(*gpt2.IGNORED_KEYS, *IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    heads = 1 if config.get("multi_query", True) else config["n_head"]
    return gpt2.decoder(config, [(gpt2.attention(config, kv_heads=heads), config["n_layer"])])


def counts(config: HfConfig) -> tuple[int, int]:
    """(heads, groups): one group with multi-query attention, else one per head."""
    return config["n_head"], 1 if config.get("multi_query", True) else config["n_head"]


LINES = gpt2.LINES.replace(" |T", "").replace("attn.c_attn.weight", "attn.c_attn.weight |apart")
LINES = LINES.replace("attn.c_attn.bias", "attn.c_attn.bias |apart")


def hf_config(ours: ModelTree) -> HfConfig:
    return {
        "architectures": ours.architectures("GPTBigCodeForCausalLM"),
        **gpt2.shared_fields(ours),
        "activation_function": ours.activation("decoder.channel.activation", tanh="gelu_pytorch_tanh"),
        "n_positions": ours["embed.positions.length"],
        "multi_query": ours.get("decoder.mixer.kv_heads") == 1,
        "scale_attn_weights": gpt2.score_fields(ours)["scale_attn_weights"],
    }


FAMILY = Family(
    "gpt_bigcode",
    tree,
    LINES,
    gpt2.IGNORED_WEIGHTS,
    transforms={"apart": grouped_qkv(counts)},
    prepare=gpt2.PREPARE,
    hf_config=hf_config,
    finish=gpt2.FINISH,
)
