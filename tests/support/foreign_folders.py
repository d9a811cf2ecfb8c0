"""Model folders of other projects, a few kilobytes each with random weights, under the names used in the docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TEXT = ["Once upon a time there was a little girl. The film is wonderful.", "Anna lives in New York.", "今天天气很好"]
ENCODER: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 32,
}
PLACES = {"max_position_embeddings": 64}


def write_strangers(folder: Path) -> None:
    """All of them, and an image."""
    import transformers as theirs
    from PIL import Image

    torch.manual_seed(0)
    texts = words(folder / "gpt2")
    marks = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    gpt2 = theirs.GPT2Config(n_embd=24, n_layer=2, n_head=3, n_positions=64, vocab_size=texts, **marks)
    theirs.GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")

    for name, kind, labels in (
        ("bert-base-uncased", "BertForMaskedLM", []),
        ("bert-sst2", "BertForSequenceClassification", ["negative", "positive"]),
        ("bert-ner", "BertForTokenClassification", ["O", "B-PER", "B-LOC"]),
        ("all-MiniLM-L6-v2", "BertModel", []),
    ):
        count = pieces(folder / name)
        said = {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}
        config = theirs.BertConfig(**ENCODER, **PLACES, vocab_size=count, **(said if labels else {}))
        getattr(theirs, kind)(config).save_pretrained(folder / name)

    sizes = {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 3, "vocab_size": 384}
    t5 = theirs.T5Config(**sizes, decoder_start_token_id=0)
    theirs.T5ForConditionalGeneration(t5).save_pretrained(folder / "flan-t5-small")
    write(folder / "flan-t5-small" / "tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer"})

    pixels = {"image_size": 8, "patch_size": 4}
    sees: dict[str, Any] = {"size": {"height": 8, "width": 8}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    sees |= {"do_resize": True, "do_normalize": True, "do_rescale": True, "rescale_factor": 1 / 255, "resample": 2}
    place = folder / "vit-base-patch16-224"
    theirs.ViTForImageClassification(theirs.ViTConfig(**ENCODER, **pixels)).save_pretrained(place)
    write(place / "preprocessor_config.json", sees | {"image_processor_type": "ViTImageProcessor"})

    place = folder / "clip-vit-base-patch32"
    marks = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    text = ENCODER | PLACES | marks | {"vocab_size": words(place, framed=True)}
    clip = theirs.CLIPConfig(text_config=text, vision_config=ENCODER | pixels, projection_dim=16)
    theirs.CLIPModel(clip).save_pretrained(place)
    cut = {"do_center_crop": True, "crop_size": {"height": 8, "width": 8}, "size": {"shortest_edge": 8}}
    write(place / "preprocessor_config.json", sees | cut | {"image_processor_type": "CLIPImageProcessor"})
    Image.new("RGB", (20, 12), (200, 120, 40)).save(folder / "cat.png")


def write(path: Path, tree: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree), encoding="utf-8")


def words(folder: Path, framed: bool = False) -> int:
    """A byte-level tokenizer as GPT-2's, or as CLIP's with marks around; how many tokens it has."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    marks = ["<|startoftext|>", "<|endoftext|>"] if framed else ["<|endoftext|>"]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=290, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    )
    if framed:
        made.post_processor = processors.TemplateProcessing(
            single=f"{marks[0]} $A {marks[1]}", special_tokens=[(mark, n) for n, mark in enumerate(marks)]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=marks[0], eos_token=marks[-1], pad_token=marks[-1]
    ).save_pretrained(folder)
    return int(made.get_vocab_size())


def pieces(folder: Path) -> int:
    """BERT's vocabulary."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    listed = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), "."]
    listed += ["the", "film", "is", "anna", "new", "york", "moon", *"今天气很好"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(listed) + "\n", encoding="utf-8")
    write(folder / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    return len(listed)
