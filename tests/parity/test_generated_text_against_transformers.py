"""Folders of theirs, with a tokenizer: a prompt goes on with the same text as in transformers, greedy and by beam
search, at once and as it comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
)

import allyouneed as ayn
import parity

CORPUS = [
    "The quick brown fox jumps over the lazy dog. How are you today? I am fine, thank you very much!",
    "Tous les êtres humains naissent libres et égaux. 你好，世界。今天天气很好！",
]
PROMPTS = ["The quick", "你好", "How are you today? I am fine", " a\n\nb"]
SIZES = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3)


def words(folder: Path, begins: bool) -> Any:
    """A byte-level tokenizer, as most of theirs have; with a begin mark before every text, or without any."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|begin|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A <|begin|> $B", special_tokens=[("<|begin|>", 1)]
        )
    start = "<|begin|>" if begins else "<|end|>"
    theirs = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=start, eos_token="<|end|>", pad_token="<|end|>")
    theirs.save_pretrained(folder)
    return theirs


def model(name: str, vocab: int) -> Any:
    if name == "gpt2":
        marks = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)
        gpt2 = dict(n_embd=24, n_layer=2, n_head=3, n_positions=64, tie_word_embeddings=False)
        return GPT2LMHeadModel(GPT2Config(**gpt2, vocab_size=vocab, **marks))
    marks = dict(bos_token_id=1, eos_token_id=0, pad_token_id=0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=40, vocab_size=vocab, **marks))
    opt = dict(SIZES, ffn_dim=40, max_position_embeddings=64, word_embed_proj_dim=24, tie_word_embeddings=False)
    return OPTForCausalLM(OPTConfig(**opt, vocab_size=vocab, **marks))


def be_talkative(theirs: Any, tokenizer: Any) -> None:
    """After each token another one is likely, so that texts differ; most of them are letters, and one ends a text."""
    reads, says = theirs.get_input_embeddings().weight, theirs.get_output_embeddings().weight
    letters = [token for token in range(2, len(says)) if tokenizer.decode([token]).isascii() or token % 7 == 0]
    with torch.no_grad():
        reads.mul_(20)
        says.mul_(0.1)
        for token, after in zip(letters, letters[1:] + letters[:1], strict=True):
            says[0 if token == letters[40] else after] += 0.3 * reads[token] / reads[token].norm()
        for name, parameter in theirs.named_parameters():
            if name.endswith(("ln_f.bias", "decoder.final_layer_norm.bias")):
                parameter.zero_()


@pytest.fixture(scope="module", params=["gpt2", "llama", "opt"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """Their model, their tokenizer, and ours of the folder the two were saved in."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = words(folder, begins=request.param != "gpt2")
    torch.manual_seed(3)
    theirs = model(request.param, len(tokenizer)).eval()
    parity.randomise(theirs, 3)
    be_talkative(theirs, tokenizer)
    theirs.save_pretrained(folder)
    return theirs, tokenizer, ayn.load(folder)


def said(theirs: Any, words: Any, prompt: str, **options: Any) -> list[int]:
    """The tokens that are new."""
    ids = words(prompt, return_tensors="pt").input_ids
    out = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, **options)
    found: list[int] = out[0, ids.shape[1] :].tolist()
    return found


def expected(theirs: Any, words: Any, prompt: str, **options: Any) -> str:
    given = words(prompt).input_ids
    text: str = words.decode([*given, *said(theirs, words, prompt, **options)], skip_special_tokens=True)
    begin = words.decode(given, skip_special_tokens=True)
    assert text.startswith(begin)
    return text[len(begin) :]


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {"method": "greedy"}),
    "beam": (
        {"num_beams": 3, "length_penalty": 0.8},
        {"method": "beam", "beam": 3, "penalty": "power", "length_penalty": 0.8},
    ),
    "penalised": (
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"method": "greedy", "repetition_penalty": 1.3, "no_repeat": 3},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_continuations_match(pair: tuple[Any, Any, Any], way: str) -> None:
    theirs, tokenizer, ours = pair
    their_way, our_way = WAYS[way]
    truth = [expected(theirs, tokenizer, prompt, **their_way) for prompt in PROMPTS]
    assert ours.generate(PROMPTS, max_length=24, **our_way) == truth
    assert ["".join(ours.stream(prompt, max_length=24, **our_way)) for prompt in PROMPTS] == truth
    assert len(set(truth)) == len(truth)


def test_stop_string(pair: tuple[Any, Any, Any]) -> None:
    theirs, tokenizer, ours = pair
    free = expected(theirs, tokenizer, PROMPTS[0])
    stop = next(free[n : n + 2] for n in range(3, len(free)) if free[n : n + 2].isascii())
    told = expected(theirs, tokenizer, PROMPTS[0], stop_strings=[stop], tokenizer=tokenizer)
    found = ours.generate(PROMPTS[0], method="greedy", max_length=24, stop=stop)
    assert stop in told and found == told[: told.index(stop)], "theirs says the string, ours ends before it"


def test_an_empty_prompt(pair: tuple[Any, Any, Any]) -> None:
    """Without a prompt theirs begins with its begin mark, which in GPT-2 is the end mark; so does ours."""
    theirs, tokenizer, ours = pair
    out = theirs.generate(do_sample=False, max_new_tokens=12)
    truth = tokenizer.decode(out[0], skip_special_tokens=True)
    assert ours.generate("", method="greedy", max_length=12) == truth and truth


def test_several_end_tokens(pair: tuple[Any, Any, Any], tmp_path: Path) -> None:
    """Whatever generation_config.json names as an end."""
    theirs, tokenizer, _ = pair
    end = said(theirs, tokenizer, PROMPTS[0])[5]
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [0, end]}))
    truth = said(type(theirs).from_pretrained(tmp_path).eval(), tokenizer, PROMPTS[0])
    assert truth[-1] == end and len(truth) <= 6
    (full,) = ayn.load(tmp_path).generate_full([PROMPTS[0]], method="greedy", max_length=24)
    assert full.text == tokenizer.decode(truth[:-1]) and full.candidates[0].finished
