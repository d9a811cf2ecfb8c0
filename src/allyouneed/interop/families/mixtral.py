"""Mixtral of Experts (Jiang et al. 2024): Mistral with a top-2 mixture of experts."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.families.mistral import WINDOW

# with jitter, theirs also perturbs the input of the experts
CHANNEL = """
decoder.mixer.bias: false
decoder.channel: {kind: moe, router: {normalise: true}}
decoder.channel.experts = num_local_experts
decoder.channel.top = num_experts_per_tok
decoder.channel.balance = router_aux_loss_coef ?? 0.001
decoder.channel.expert: {kind: glu, bias: false}
decoder.channel.expert.hidden = intermediate_size
decoder.channel.expert.activation = hidden_act |activation gelu_pytorch_tanh
router_jitter_noise in [0.0]
"""
EXPERTS = """
decoder.blocks.{n}.sublayers.channel.router.linear.weight = MOE.gate.weight
decoder.blocks.{n}.sublayers.channel.experts.{e}.gate_up.weight = MOE.experts.{e}.w1.weight + MOE.experts.{e}.w3.weight
decoder.blocks.{n}.sublayers.channel.experts.{e}.down.weight = MOE.experts.{e}.w2.weight
""".replace("MOE", "model.layers.{n}.block_sparse_moe")

FAMILY = llama.family(
    "mixtral",
    "MixtralForCausalLM",
    llama.MODEL + llama.ATTENTION_FIELDS + WINDOW + CHANNEL,
    llama.OUTSIDE + llama.NORMS + llama.ATTENTION + EXPERTS,
)
