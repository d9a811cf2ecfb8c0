"""The template of special tokens around texts, between two texts, and the type of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictInt, TypeAdapter, ValidationError

from allyouneed.errors import UserError

Id = Annotated[StrictInt, Field(ge=0, lt=1 << 31)]
Ids = Annotated[tuple[Id, ...], Field(max_length=1000)]
Banned = Annotated[tuple[Id, ...], Field(max_length=1 << 22)]


@dataclass(frozen=True)
class Template:
    """One text is `before text after`, two are `before first between second after`.

    `opening`: decoder start tokens (of a prompt, or of the target of an encoder-decoder); may be empty.
    `types`: token type ids of the first text, and of the second text and what follows it (BERT: 0 and 1).
    `closing`: the type id of the last token if it has its own (XLNet's `<cls>`).
    `language`: where the source-language token goes, for models that read one; the target-language token is then the
    first one generated. `spoken`: the default source language.
    `forced`: tokens a target must begin with after `opening`; they count as generated.
    `stops`: tokens that end a text like EOS; `never`: tokens that are never generated.
    `ended`: a text that reaches its maximum length ends with EOS.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # it is read from tokenizer.marks.json

    before: Ids = ()
    between: Ids = ()
    after: Ids = ()
    opening: Ids = ()
    types: tuple[Id, Id] = (0, 1)
    closing: Id | None = None
    language: Literal["before", "after"] | None = None
    spoken: Id | None = None
    forced: Ids = ()
    stops: Ids = ()
    never: Banned = ()
    ended: StrictBool = False

    @classmethod
    def default(cls, bos: int, eos: int) -> Template:
        """The template of tokenizers trained here."""
        return cls((bos,), (eos,), (eos,), (bos,))

    def count(self, texts: int = 1) -> int:
        """Number of special tokens around this many texts."""
        return len(self.before) + len(self.after) + (len(self.between) if texts > 1 else 0)

    def frame(self, first: Sequence[int], second: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """The tokens with special tokens, and the type of each."""
        tokens = [*self.before, *first]
        if second is not None:
            tokens += self.between
        types = [self.types[0]] * len(tokens)
        rest = [*(second or ()), *self.after]
        types += [self.types[0 if second is None else 1]] * len(rest)
        if self.closing is not None and types:
            types[-1] = self.closing
        return [*tokens, *rest], types

    def to_tree(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: Any) -> Template:
        """Inverse of `to_tree`."""
        try:
            return TypeAdapter(cls).validate_python(tree)
        except ValidationError:
            raise UserError(f"a template is a mapping of {', '.join(cls.__dataclass_fields__)}") from None

    @property
    def used_ids(self) -> set[int]:
        """Every id it names."""
        lists = (self.before, self.between, self.after, self.opening, self.forced, self.stops, self.never)
        return {number for ids in lists for number in ids} | ({self.spoken} if self.spoken is not None else set())

    @property
    def used_types(self) -> set[int]:
        return {*self.types} | ({self.closing} if self.closing is not None else set())
