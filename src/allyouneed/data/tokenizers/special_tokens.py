"""What stands around the texts a model reads: begin and end marks, what parts two texts, and the type of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from allyouneed.errors import UserError

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Template:
    """One text is `before text after`, two are `before first between second after`.

    `opening`: what a text that goes on begins with (a prompt, or the target of an encoder-decoder); may be empty.
    `types`: of the first text and its marks, and of the second and what follows it (BERT: 0 and 1).
    `closing`: the type of the last mark where it has one of its own (XLNet's `<cls>`).
    `language`: where the token of the language that a source is written in stands, in models that read one; the token
    of the language to translate into is then the first thing they say. `spoken`: the source's language when not told.
    `forced`: what a target must begin with after its opening, counted as said by the model.
    `stops`: tokens that end a text as the end mark does; `never`: tokens that are never said.
    `ended`: a text that reaches its greatest length ends there with the end mark.
    """

    before: Ids = ()
    between: Ids = ()
    after: Ids = ()
    opening: Ids = ()
    types: tuple[int, int] = (0, 1)
    closing: int | None = None
    language: Literal["before", "after"] | None = None
    spoken: int | None = None
    forced: Ids = ()
    stops: Ids = ()
    never: Ids = ()
    ended: bool = False

    @classmethod
    def own(cls, bos: int, eos: int) -> Template:
        """Those of tokenizers that were trained here."""
        return cls((bos,), (eos,), (eos,), (bos,))

    def count(self, texts: int = 1) -> int:
        """How many marks go with so many texts."""
        return len(self.before) + len(self.after) + (len(self.between) if texts > 1 else 0)

    def frame(self, first: Sequence[int], second: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """The tokens with their marks, and the type of each."""
        tokens = [*self.before, *first]
        if second is not None:
            tokens += self.between
        types = [self.types[0]] * len(tokens)
        rest = [*(second or ()), *self.after]
        types += [self.types[0 if second is None else 1]] * len(rest)
        if self.closing is not None and types:
            types[-1] = self.closing
        return [*tokens, *rest], types

    def tree(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, tree: Any) -> Template:
        """What `tree` wrote."""
        if not isinstance(tree, Mapping) or not set(tree) <= set(cls.__dataclass_fields__):
            raise UserError(f"marks are a mapping of {', '.join(cls.__dataclass_fields__)}")
        found: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in tree.items()}
        return cls(**found)
