"""Mistral 7B (Jiang et al. 2023): Llama with a sliding window."""

from __future__ import annotations

from allyouneed.interop.families import llama

WINDOW = """
decoder.mixer.pattern = sliding_window |window
"""
FAMILY = llama.family("mistral", "MistralForCausalLM", llama.FIELDS + llama.NO_BIAS + WINDOW)
