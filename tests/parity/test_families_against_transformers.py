"""Every family reads what transformers writes and refuses unknown keys."""

import pytest
from transformers import CONFIG_MAPPING

from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

# what some defaults of theirs need to be a model of ours
NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}, "reformer": {"is_decoder": True, "num_buckets": 8}}


def defaults(name):
    return CONFIG_MAPPING[name]().to_dict() | NEEDED.get(name, {})


@pytest.mark.parametrize("name", FAMILIES)
def test_a_new_key_is_refused_by_name(name):
    config = defaults(name)
    assert FAMILIES[name].tree(config)["kind"]
    with pytest.raises(UserError, match="trick_of_tomorrow: 1"):
        FAMILIES[name].tree(config | {"trick_of_tomorrow": 1})


# of a config that transformers 4 wrote out in full
OLD = {
    "_name_or_path": "somebody/something",
    "add_cross_attention": False,
    "diversity_penalty": 0.0,
    "do_sample": True,
    "early_stopping": True,
    "encoder_no_repeat_ngram_size": 0,
    "finetuning_task": "mnli",
    "forced_bos_token_id": None,
    "length_penalty": 2.0,
    "max_length": 142,
    "min_length": 56,
    "no_repeat_ngram_size": 3,
    "num_beam_groups": 1,
    "num_beams": 4,
    "num_return_sequences": 1,
    "output_scores": False,
    "problem_type": "single_label_classification",
    "pruned_heads": {},
    "repetition_penalty": 1.0,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "task_specific_params": {"summarization": {"num_beams": 4}},
    "temperature": 1.0,
    "tie_encoder_decoder": False,
    "tokenizer_class": "SomeTokenizer",
    "top_k": 50,
    "top_p": 1.0,
    "torch_dtype": "float16",
    "torchscript": False,
    "transformers_version": "4.9.0.dev0",
    "use_bfloat16": False,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_extra_keys_of_old_files_are_accepted(name):
    config = defaults(name)
    assert FAMILIES[name].tree(config | OLD) == FAMILIES[name].tree(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_pruned_heads_are_refused(name):
    with pytest.raises(UserError, match="pruned_heads"):
        FAMILIES[name].tree(defaults(name) | {"pruned_heads": {"0": [1]}})


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("bert", "BertForMultipleChoice"),
        ("t5", "T5ForTokenClassification"),
        ("bart", "BartForSequenceClassification"),
        ("marian", "MarianForCausalLM"),
        ("vit", "ViTForMaskedImageModeling"),
        ("deit", "DeiTForMaskedImageModeling"),
        ("clip", "CLIPTextModel"),
        ("whisper", "WhisperForAudioClassification"),
    ],
)
def test_a_class_for_another_task_is_refused_by_name(family, name):
    with pytest.raises(UserError, match=f"architectures: '{name}' is not supported"):
        FAMILIES[family].tree(defaults(family) | {"architectures": [name]})
