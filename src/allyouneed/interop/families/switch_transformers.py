"""Switch Transformer (Fedus et al. 2022): T5 with a top-1 mixture of experts in some layers."""

from __future__ import annotations

from collections.abc import Iterator

from allyouneed.interop.families import t5
from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import OMITTED, ModelTree

# padding never takes expert capacity in ours
FIELDS = t5.MODEL + """
kind = architectures |class [CLASS, {ForConditionalGeneration: encoder-decoder, Model: encoder-decoder}]
router_dtype in [float32]
router_type in [tokens_masked]
num_selected_experts in [1]
feed_forward_proj in [relu]
?? {d_model: 768, num_layers: 12, num_heads: 12, num_sparse_encoder_layers: 3, num_sparse_decoder_layers: 3}
ignore encoder_sparse_step, decoder_sparse_step, router_ignore_padding_tokens
"""  # fmt: skip
CHANNELS = """
SIDE[*].channel.kind = num_sparse_SIDE_layers |sparse
SIDE.channel<ffn>: {bias: false}
SIDE.channel<ffn>.hidden = d_ff ?? 2048
SIDE.channel<ffn>.activation <- dense_act_fn ?? relu |activation
SIDE.channel<ffn>.dropout <- dropout_rate
SIDE.channel<moe>: {top: 1, expert: {kind: ffn, bias: false}, router: {}}
SIDE.channel<moe>.experts = num_experts ?? 8
SIDE.channel<moe>.expert.hidden = d_ff
SIDE.channel<moe>.expert.activation = dense_act_fn |activation
SIDE.channel<moe>.expert.dropout <- dropout_rate
SIDE.channel<moe>.row_capacity = expert_capacity ?? 64
SIDE.channel<moe>.balance = router_aux_loss_coef ?? 0.001
SIDE.channel<moe>.router.bias = router_bias ?? false
SIDE.channel<moe>.router.jitter = router_jitter_noise ?? 0.01
SIDE.channel<moe>.router.z_loss = router_z_loss_coef ?? 0.001
"""


def with_experts(count: int, sparse: int) -> Iterator[bool]:
    """For each layer, whether it is one of the `sparse` ones."""
    step = count // sparse if sparse else count
    return (step == 1 or n % step == 1 for n in range(count))


def read_sparse(config: ConfigReader, line: Line) -> list[str]:
    """Every n-th layer has experts, counted as in their code (which puts them in the second layer where none is
    wanted)."""
    decoder = line.path.startswith("decoder") and config.get("num_decoder_layers")
    return ["moe" if has else "ffn" for has in with_experts(decoder or config["num_layers"], config[line.key])]


def write_sparse(ours: ModelTree, line: Line) -> int | object:
    side = line.path.partition("[")[0]
    which = [layer["channel.kind"] == "moe" for layer in ours.layers(side)]
    counts = [n for n in range(len(which) + 1) if list(with_experts(len(which), n)) == which]
    if not counts:
        ours.problems.append(f"{side}: experts in layers {[n for n, has in enumerate(which) if has]} cannot be ours")
    return max(counts) if counts and any(which) else OMITTED


EXPERTS = """
encoder.blocks.{n}.sublayers.channel.router.linear.* = encoder.block.{n}.layer.1.mlp.router.classifier.*
encoder.blocks.{n}.sublayers.channel.experts.{e}.up.* = encoder.block.{n}.layer.1.mlp.experts.expert_{e}.wi.*
encoder.blocks.{n}.sublayers.channel.experts.{e}.down.* = encoder.block.{n}.layer.1.mlp.experts.expert_{e}.wo.*
decoder.blocks.{n}.sublayers.channel.router.linear.* = decoder.block.{n}.layer.2.mlp.router.classifier.*
decoder.blocks.{n}.sublayers.channel.experts.{e}.up.* = decoder.block.{n}.layer.2.mlp.experts.expert_{e}.wi.*
decoder.blocks.{n}.sublayers.channel.experts.{e}.down.* = decoder.block.{n}.layer.2.mlp.experts.expert_{e}.wo.*
"""
SIDES = "".join(CHANNELS.replace("SIDE", side) for side in ("encoder", "decoder"))
FAMILY = t5.family(
    "switch_transformers",
    "SwitchTransformers",
    FIELDS + SIDES,
    t5.LINES.replace("FFN", "mlp") + EXPERTS,
    {"sparse": Conversion(read_sparse, write_sparse)},
)
