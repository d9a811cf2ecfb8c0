"""Reading their config: what a family asks for is noted, and what nobody asked for is refused.

One key of a config can make the model another one. So a tree is made through a `Reader`: every key must have been read,
or be known to change nothing, or be off (null, false, 0, empty). The rest is refused by name, all of it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import wraps
from typing import Any

from allyouneed.errors import UserError

Tree = dict[str, Any]

# in every family: how the file was made, what only training looks at, names of classes and tokens
MADE = (
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
# how text is generated, which older files say here too
GENERATION = (
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


class Reader(Mapping[str, Any]):
    """`where` is what a message says before a key: the path of a config inside another one."""

    def __init__(self, config: Mapping[str, Any], where: str = "", problems: list[str] | None = None) -> None:
        self.config, self.where, self.seen = config, where, set[str]()
        self.problems: list[str] = [] if problems is None else problems

    def __getitem__(self, key: str) -> Any:
        if key not in self.config:
            raise UserError(f"{self.where}{key}: missing in the config")
        self.seen.add(key)
        return self.config[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Their value, or what they take where nothing is said."""
        self.seen.add(key)
        return self.config.get(key, default)

    def first(self, *keys: str) -> Any:
        """The first of several names of one thing that is there."""
        found = [self[key] for key in keys if key in self.config]
        return found[0] if found else self[keys[0]]

    def suppose(self, defaults: Mapping[str, Any]) -> None:
        """What a family takes where nothing is said: files may leave such keys out."""
        self.seen |= defaults.keys() - self.config.keys()
        self.config = {**defaults, **self.config}

    def __contains__(self, key: object) -> bool:
        return key in self.config

    def __iter__(self) -> Iterator[str]:
        return iter(self.config)

    def __len__(self) -> int:
        return len(self.config)

    def only(self, key: str, *allowed: Any) -> Any:
        """One of these values; the first where nothing is said."""
        return self.choose(key, {value: value for value in allowed}, allowed[0])

    def choose(self, key: str, words: Mapping[Any, Any], default: Any = None) -> Any:
        """Our word for theirs."""
        said = self.get(key, default)
        if said in words:
            return words[said]
        self.problems.append(f"{self.where}{key}: {said!r} is not known here ({', '.join(map(str, words))} are)")
        return next(iter(words.values()))

    def classes(self, *ends: str) -> None:
        """The name of their class must end in one of these; a file may leave it out."""
        name: str = (self.get("architectures") or [""])[0]
        if name and not name.endswith(ends):
            known = ", ".join(f"…{end}" for end in ends)
            self.problems.append(f"{self.where}architectures: {name!r} is not known here ({known} are)")

    def activation(self, key: str) -> str:
        word: str = self.choose(key, ACTIVATIONS)
        return word

    def inside(self, key: str) -> Reader:
        """A config inside this one, which is read to the end as well."""
        return Reader(self.get(key) or {}, f"{self.where}{key}.", self.problems)

    def finish(self, *harmless: str) -> None:
        """Note what was not read, is not off and not harmless."""
        known = (*MADE, *GENERATION, *harmless)
        for key, value in self.config.items():
            read = key in self.seen or any(fnmatchcase(key, pattern) for pattern in known)
            if value and not read:
                self.problems.append(f"{self.where}{key}: {value!r} is not known here, and may change what is computed")


def reading(*harmless: str) -> Callable[[Callable[[Reader], Tree]], Callable[[Mapping[str, Any]], Tree]]:
    """A family's `tree` that refuses what it does not read, but for these keys (patterns with `*`)."""

    def decorate(tree: Callable[[Reader], Tree]) -> Callable[[Mapping[str, Any]], Tree]:
        @wraps(tree)
        def checked(config: Mapping[str, Any]) -> Tree:
            reader = Reader(config)
            found = tree(reader)
            reader.finish(*harmless)
            if reader.problems:
                name = config.get("model_type", "this family")
                raise UserError(f"{name}: what the config asks for is not here\n  " + "\n  ".join(reader.problems))
            return found

        return checked

    return decorate
