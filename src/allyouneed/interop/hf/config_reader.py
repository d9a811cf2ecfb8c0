"""Read a Hugging Face config strictly: keys that no family reads are refused.

A single unread key can change the model. So a family builds its tree through a `ConfigReader`: every key must be read,
be known to change nothing, or be off (null, false, 0, empty). All other keys are reported at once, by name.
`outer.key` is a key of the config under `outer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

from allyouneed.errors import UserError

Tree = dict[str, Any]

# ignored in every family: provenance, training-only options, class and token names
METADATA_KEYS = (
    "_attn_implementation_autoset",
    "_name_or_path",
    "*_token_id",
    "architectures",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "initializer_range",
    "keys_to_ignore_at_inference",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
# generation options, which older files keep in config.json
GENERATION_KEYS = (
    "*no_repeat_ngram_size",
    "*suppress_tokens",
    "*_penalty",
    "bad_words_ids",
    "do_sample",
    "early_stopping",
    "max_length",
    "min_length",
    "num_beam*",
    "num_return_sequences",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
)

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_accurate": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu-tanh",
    "linear": "identity",
    "mish": "mish",
    "quick_gelu": "quick-gelu",
    "relu": "relu",
    "relu2": "relu-squared",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


class ConfigReader(Mapping[str, Any]):
    """`prefix`: the path of a nested config, prepended to keys in messages."""

    def __init__(self, config: Mapping[str, Any], prefix: str = "", problems: list[str] | None = None) -> None:
        self.config, self.prefix, self.read_keys = config, prefix, set[str]()
        self.problems: list[str] = [] if problems is None else problems
        self.parts: dict[str, ConfigReader] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise UserError(f"{self.prefix}{key}: missing in the config")
        return self.get(key)

    def get(self, key: str, default: Any = None) -> Any:
        outer, _, key = key.rpartition(".")
        if outer:
            return self.nested(outer).get(key, default)
        self.read_keys.add(key)
        return self.config.get(key, default)

    def first_of(self, *keys: str) -> Any:
        """The value of the first present key among several names of one option."""
        found = [self[key] for key in keys if key in self.config]
        return found[0] if found else self[keys[0]]

    def set_defaults(self, defaults: Mapping[str, Any]) -> None:
        """The family's defaults for keys the file leaves out."""
        for key, value in defaults.items():
            outer, _, inner = key.rpartition(".")
            if outer:
                self.nested(outer).set_defaults({inner: value})
            elif key not in self.config:
                self.read_keys.add(key)
                self.config = {**self.config, key: value}

    def __contains__(self, key: object) -> bool:
        outer, _, key = str(key).rpartition(".")
        return key in (self.nested(outer).config if outer else self.config)

    def __iter__(self) -> Iterator[str]:
        return iter(self.config)

    def __len__(self) -> int:
        return len(self.config)

    def require(self, key: str, *allowed: Any) -> Any:
        """One of these values; the first is the default."""
        return self.map_value(key, {value: value for value in allowed}, allowed[0])

    def refuse_set(self, *keys: str) -> None:
        """Keys that must be absent or off: null, false, 0, empty."""
        for key in keys:
            if value := self.get(key):
                self.problems.append(f"{self.prefix}{key}: {value!r} is not supported")

    def map_value(self, key: str, names: Mapping[Any, Any], default: Any = None) -> Any:
        """Our name for their value."""
        value = self.get(key, default)
        if value in names:
            return names[value]
        self.problems.append(f"{self.prefix}{key}: {value!r} is not supported (allowed: {', '.join(map(str, names))})")
        return next(iter(names.values()))

    def require_architecture(self, *suffixes: str) -> None:
        """The class name, where given, must end in one of these."""
        name: str = (self.get("architectures") or [""])[0]
        if name and not name.endswith(suffixes):
            allowed = ", ".join(f"…{suffix}" for suffix in suffixes)
            self.problems.append(f"{self.prefix}architectures: {name!r} is not supported (allowed: {allowed})")

    def activation(self, key: str) -> str:
        return self.map_value(key, ACTIVATIONS)

    def nested(self, key: str) -> ConfigReader:
        """The reader of the config under this key; it shares `problems`."""
        if key not in self.parts:
            self.parts[key] = ConfigReader(self.get(key) or {}, f"{self.prefix}{key}.", self.problems)
        return self.parts[key]

    def refuse_unread(self, *ignored: str) -> None:
        """Record every key that is set, was not read and is not in `ignored` (patterns with `*`), nested ones too."""
        known = (*(self.prefix + key for key in (*METADATA_KEYS, *GENERATION_KEYS)), *ignored)
        for key, value in self.config.items():
            name = self.prefix + key
            if value and key not in self.read_keys and not any(fnmatchcase(name, pattern) for pattern in known):
                self.problems.append(f"{name}: {value!r} is not supported and may change what the model computes")
        for part in self.parts.values():
            part.refuse_unread(*ignored)


def is_headless(config: Mapping[str, Any]) -> bool:
    """Whether the class name is that of a model without a head."""
    name = (config.get("architectures") or [""])[0]
    return bool(name.endswith("Model") and not name.endswith(("LMHeadModel", "MTModel", "EncoderModel")))


def strict_config(*ignored: str) -> Callable[[Callable[[ConfigReader], Tree]], Callable[[Mapping[str, Any]], Tree]]:
    """Decorate a family's `tree`: refuse configs with keys it does not read, except `ignored` (patterns with `*`)."""

    def decorate(tree: Callable[[ConfigReader], Tree]) -> Callable[[Mapping[str, Any]], Tree]:
        @wraps(tree)
        def checked(config: Mapping[str, Any]) -> Tree:
            reader = ConfigReader(config)
            found = tree(reader)
            reader.refuse_unread(*ignored)
            if reader.problems:
                name = config.get("model_type", "this family")
                raise UserError(f"{name}: unsupported config\n  " + "\n  ".join(dict.fromkeys(reader.problems)))
            return found

        return checked

    return decorate
