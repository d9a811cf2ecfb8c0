"""RWKV-4 (Peng et al. 2023): a norm after the embedding, token shift, a decay per feature."""

from __future__ import annotations

from allyouneed.interop.hf.decoders import decoder_family
from allyouneed.interop.hf.weight_table import TensorTransform

# layer_norm_epsilon is hard-coded in their last norm; ignored are the limit of their CUDA kernel, and rescaling that
# does not change the result
FIELDS = """
kind: decoder
vocab = vocab_size
width = hidden_size
norm: {kind: layer, eps: 1.0e-5}
layer_norm_epsilon in [1.0e-5]
-> {layer_norm_epsilon: 1.0e-5, rescale_every: 0}
embed: {scale: none, norm: {kind: layer, eps: 1.0e-5}}
embed.tied = tie_word_embeddings ?? false
decoder.repeat = num_hidden_layers
decoder.wiring: pre-norm
decoder.mixer: {kind: rwkv}
decoder.mixer.hidden = attention_hidden_size |unless_width
decoder.channel: {kind: rwkv-channel}
decoder.channel.hidden = intermediate_size or 4 * hidden_size
head.kind = architectures |decoder RwkvForCausalLM
ignore context_length, rescale_every
"""
LINES = """
embed.tokens.weight = rwkv.embeddings.weight
embed.norm.* = rwkv.blocks.0.pre_ln.*
head.weight = head.weight
decoder.blocks.{n}.wiring.norms.0.* = rwkv.blocks.{n}.ln1.*
decoder.blocks.{n}.wiring.norms.1.* = rwkv.blocks.{n}.ln2.*
decoder.blocks.{n}.sublayers.mixer.mix_r = rwkv.blocks.{n}.attention.time_mix_receptance |flat
decoder.blocks.{n}.sublayers.mixer.mix_k = rwkv.blocks.{n}.attention.time_mix_key |flat
decoder.blocks.{n}.sublayers.mixer.mix_v = rwkv.blocks.{n}.attention.time_mix_value |flat
decoder.blocks.{n}.sublayers.mixer.decay = rwkv.blocks.{n}.attention.time_decay
decoder.blocks.{n}.sublayers.mixer.bonus = rwkv.blocks.{n}.attention.time_first
decoder.blocks.{n}.sublayers.mixer.r.weight = rwkv.blocks.{n}.attention.receptance.weight
decoder.blocks.{n}.sublayers.mixer.k.weight = rwkv.blocks.{n}.attention.key.weight
decoder.blocks.{n}.sublayers.mixer.v.weight = rwkv.blocks.{n}.attention.value.weight
decoder.blocks.{n}.sublayers.mixer.out.weight = rwkv.blocks.{n}.attention.output.weight
decoder.blocks.{n}.sublayers.channel.mix_r = rwkv.blocks.{n}.feed_forward.time_mix_receptance |flat
decoder.blocks.{n}.sublayers.channel.mix_k = rwkv.blocks.{n}.feed_forward.time_mix_key |flat
decoder.blocks.{n}.sublayers.channel.r.weight = rwkv.blocks.{n}.feed_forward.receptance.weight
decoder.blocks.{n}.sublayers.channel.up.weight = rwkv.blocks.{n}.feed_forward.key.weight
decoder.blocks.{n}.sublayers.channel.down.weight = rwkv.blocks.{n}.feed_forward.value.weight
decoder.end.* = rwkv.ln_out.*
"""
FLAT = TensorTransform(lambda tensor, config: tensor.flatten(), lambda tensor, config: tensor[None, None])
FAMILY = decoder_family("rwkv", FIELDS, LINES, "rwkv.embeddings.weight", head="head.weight", transforms={"flat": FLAT})
