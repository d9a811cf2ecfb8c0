"""Any model called the same way: inputs by name, in lists or tensors, as a batch; and what comes out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Input, Rows, Signal
from allyouneed.nn.embed.frames import FrameEmbed
from allyouneed.nn.mixers.attention.longformer import Longformer
from allyouneed.nn.models.two_stream import append_query_stream
from allyouneed.nn.patterns.marked import Chosen, Permuted
from allyouneed.nn.positions.xlnet import XLNetRelative

MEANINGS = {
    "tokens": "token ids, a list for each text or a padded tensor (texts, time)",
    "lengths": "how many tokens of each row of a tensor are no padding",
    "targets": "token ids of what is written, begin mark first",
    "types": "the kind of text each token belongs to, as tokens",
    "pixels": "(images, channels, height, width)",
    "features": "log-mel frames (sounds, mels, frames)",
    "global_positions": "for each text the places that see all and are seen by all",
    "order": "when each token is said, from 0 on, as tokens",
}
Inputs = Mapping[str, Any]


def takes(config: Any) -> dict[str, bool]:
    """The inputs of a model, and whether it cannot do without."""
    if config.kind == "two-towers":
        return {name: False for name in ("pixels", *takes(config.text))}
    reader = _reader(config)
    if reader.reads is Signal:
        found = {"features" if isinstance(reader, FrameEmbed) else "pixels": True}
    else:
        parts = list(_parts(config))
        found = {"tokens": True, "lengths": False}
        typed = reader.types is not None or any(isinstance(part, XLNetRelative) for part in parts)
        chosen = any(isinstance(part, Longformer | Chosen) for part in parts)
        ordered = any(isinstance(part, Permuted) for part in parts)
        found |= {"types": False} if typed else {}
        found |= {"global_positions": False} if chosen else {}
        found |= {"order": False, "targets": False} if ordered else {}
    return found | ({"targets": False} if config.kind == "encoder-decoder" else {})


def _reader(config: Any) -> Any:
    """The embedding of what is read first."""
    if config.kind == "two-towers":
        return config.text.embed
    return getattr(config, "source_embed", None) or config.embed


def _parts(config: Any) -> Iterator[Any]:
    yield config
    values: Any = ()
    if isinstance(config, BaseModel):
        values = (getattr(config, name) for name in type(config).model_fields)
    elif isinstance(config, tuple | list):
        values = config
    for value in values:
        if isinstance(value, BaseModel | tuple | list):
            yield from _parts(value)


class Called:
    """A module that is called with inputs by name. What is padding in them is padding in what comes out: rows are as
    long as the longest, and what stands behind the end of a shorter one means nothing."""

    def __init__(self, module: Any, pad: int = 0) -> None:
        self.module, self.config, self.pad = module, module.config, pad
        first = next(module.parameters())
        self.device, self.dtype = first.device, first.dtype

    def logits(self, given: Inputs) -> Tensor:
        """What the head makes of them: scores of tokens, classes or tags, one vector, or image times text."""
        self._check(given)
        if self.config.kind == "two-towers":
            self._need(given, "pixels", "tokens")
            return self._run(lambda: self.module.logits(Batch(self._rows(given), self._signal(given["pixels"]))))
        if self.config.kind == "encoder-decoder":
            self._need(given, "targets")
        asked = self._places(given)
        if (sounds := given.get("features")) is not None and _uneven(sounds):
            return _padded([self.logits(one) for one in _one_by_one(given)])
        found = self._run(lambda: self.module.logits(self._batch(given)))
        return found if asked is None else _at(found, self._lengths(given), asked)

    def hidden(self, given: Inputs, layer: int | str | None = None) -> Any:
        """The last vectors before the head, or those after so many layers (0: what goes into the first), or `"all"`."""
        self._check(given)
        if (sounds := given.get("features")) is not None and _uneven(sounds):
            found = [self.hidden(one, layer) for one in _one_by_one(given)]
            return [_padded(list(rows)) for rows in zip(*found, strict=True)] if layer == "all" else _padded(found)
        call, blocks = self._reader(given)
        if layer is None:
            last: Tensor = self._run(call)
            return self._behind(last, given)
        with _Watch(blocks) as watch:
            last = self._run(call)
        layers = [self._behind(one, given) for one in watch.layers(last)]
        if layer == "all":
            return layers
        if not isinstance(layer, int) or not -len(layers) <= layer < len(layers):
            raise UserError(f"layer={layer!r}: a number from 0 (what goes in) to {len(layers) - 1}, or 'all'")
        return layers[layer]

    def _reader(self, given: Inputs) -> tuple[Callable[[], Tensor], Sequence[nn.Module]]:
        """What is run for hidden states, and the blocks it goes through."""
        module = self.module
        if self.config.kind == "two-towers":
            if ("pixels" in given) == ("tokens" in given):
                raise UserError("hidden states are of images or of texts: give pixels or tokens, one of the two")
            tower = module.image if "pixels" in given else module.text
            entry: Input = self._signal(given["pixels"]) if "pixels" in given else self._rows(given)
            return lambda: tower(Batch(entry)), tower.encoder.blocks
        if self.config.kind == "encoder-decoder" and "targets" not in given:
            source = self._source(given)
            return lambda: module.encode(source).hidden, module.encoder.blocks
        batch = self._batch(given)
        stacks = [getattr(module, name) for name in ("first", "second") if hasattr(module, name)]
        if not stacks:
            stacks = [module.decoder if hasattr(module, "decoder") else module.encoder]
        return lambda: module(batch), [block for stack in stacks for block in stack.blocks]

    def _run(self, call: Callable[[], Tensor]) -> Tensor:
        was_training: bool = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                return call()
        finally:
            self.module.train(was_training)

    # --- from names to a batch ---------------------------------------------------------------------------------------

    def _check(self, given: Inputs) -> None:
        able = takes(self.config)
        said = ", ".join(f"{name} ({MEANINGS[name]})" for name in able)
        strange = [name for name in given if name not in able]
        if strange:
            why = "is no input" if strange[0] not in MEANINGS else "is nothing that this model reads"
            raise UserError(f"{strange[0]} {why}; it takes {said}")
        self._need(given, *(name for name, needed in able.items() if needed))
        if not given:
            raise UserError(f"there is nothing to read; it takes {said}")

    def _need(self, given: Inputs, *names: str) -> None:
        for name in names:
            if given.get(name) is None:
                raise UserError(f"{name} is missing: {MEANINGS[name]}")

    def _batch(self, given: Inputs) -> Batch:
        if self.config.kind == "encoder-decoder":
            source, target = self._source(given), self._tokens("targets", given["targets"])
            rows = len(source.tokens if isinstance(source, Rows) else source.values)  # type: ignore[union-attr]
            if rows != len(target.tokens):
                raise UserError(f"targets: one row for each source; there are {len(target.tokens)} and {rows}")
            return Batch(target, source)
        places = self._places(given)
        entry = self._source(given)
        if places is not None:
            assert isinstance(entry, Rows)
            entry = append_query_stream(entry, places, self.pad)
        return Batch(entry)

    def _source(self, given: Inputs) -> Input:
        signal = given.get("pixels") if "pixels" in given else given.get("features")
        return self._rows(given) if signal is None else self._signal(signal)

    def _rows(self, given: Inputs) -> Rows:
        rows = self._tokens("tokens", given["tokens"], given.get("lengths"))
        if given.get("types") is not None:
            types = self._like("types", given["types"], rows)
            kinds = _reader(self.config).types
            if kinds is not None and not 0 <= int(types.min()) <= int(types.max()) < kinds:
                raise UserError(f"types go from 0 to {kinds - 1} in this model")
            rows = replace(rows, types=types)
        if given.get("order") is not None:
            rows = replace(rows, order=self._like("order", given["order"], rows))
        if given.get("global_positions") is not None:
            rows = replace(rows, chosen=self._marked(given["global_positions"], rows))
        return rows

    def _tokens(self, name: str, value: Any, lengths: Any = None) -> Rows:
        rows = _table(name, value)
        if rows.lengths is not None and lengths is not None:
            raise UserError(f"lengths belong to a padded tensor; those of {name} are of unequal length by themselves")
        if lengths is not None:
            counts = torch.as_tensor(lengths, dtype=torch.long)
            count, time = rows.tokens.shape
            if counts.shape != (count,) or not bool(((counts > 0) & (counts <= time)).all()):
                raise UserError(f"lengths: a number from 1 to {time} for each of the {count} rows of {name}")
            rows = replace(rows, lengths=counts)
        vocab = self.config.vocabs
        most = vocab.target if name == "targets" else vocab.source
        if rows.tokens.numel() and not 0 <= int(rows.tokens.min()) <= int(rows.tokens.max()) < most:
            raise UserError(f"{name}: ids go from 0 to {most - 1} in this model")
        return rows.to(self.device)

    def _like(self, name: str, value: Any, rows: Rows) -> Tensor:
        found = _table(name, value).to(self.device)
        same = found.tokens.shape == rows.tokens.shape
        if same and found.lengths is not None:
            same = rows.lengths is not None and torch.equal(found.lengths, rows.lengths)
        if not same:
            raise UserError(f"{name}: one for each token, in rows as long as those of tokens")
        return found.tokens

    def _marked(self, value: Any, rows: Rows) -> Tensor:
        """Places of each row, or a mask of all of them."""
        if isinstance(value, Tensor) and value.dtype == torch.bool and value.shape == rows.tokens.shape:
            return value.to(self.device)
        count, time = rows.tokens.shape
        places = _lists("global_positions", value)
        if len(places) != count or any(not 0 <= place < time for row in places for place in row):
            raise UserError(f"global_positions: for each of the {count} texts a list of places from 0 to {time - 1}")
        marked = torch.zeros_like(rows.tokens, dtype=torch.bool)
        for row, chosen in enumerate(places):
            marked[row, chosen] = True
        return marked

    def _signal(self, value: Any) -> Signal:
        tensors = list(value) if isinstance(value, list | tuple) else None
        values = torch.stack([torch.as_tensor(one) for one in tensors]) if tensors else torch.as_tensor(value)
        if not values.numel():
            raise UserError(f"there is nothing in what is given: {tuple(values.shape)}")
        return Signal(values.to(self.device, self.dtype))

    # --- tokens that are asked for (permutation language models) -----------------------------------------------------

    def _places(self, given: Inputs) -> list[list[int]] | None:
        """Of each row the places whose tokens are to be told from what is said before them."""
        if self.config.kind == "encoder-decoder" or given.get("targets") is None:
            return None
        if given.get("order") is None:
            raise UserError("targets are told in an order: give it as well")
        lengths = self._lengths(given)
        places = _lists("targets", given["targets"])
        if len(places) != len(lengths) or any(
            not 0 <= place < length for row, length in zip(places, lengths, strict=True) for place in row
        ):
            raise UserError("targets: for each text the places that are asked for, all of them inside it")
        return places

    def _lengths(self, given: Inputs) -> list[int]:
        rows = self._tokens("tokens", given["tokens"], given.get("lengths"))
        count, time = rows.tokens.shape
        return [time] * count if rows.lengths is None else rows.lengths.tolist()

    def _behind(self, found: Tensor, given: Inputs) -> Tensor:
        places = self._places(given)
        return found if places is None else _at(found, self._lengths(given), places)


class _Watch:
    """What goes into the first block, and what comes out of each."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks, self.seen = blocks, list[Any]()

    def __enter__(self) -> _Watch:
        def begin(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if not self.seen:
                self.seen.append(inputs[0])

        self.hooks: list[Any] = [self.blocks[0].register_forward_pre_hook(begin)]
        for block in dict.fromkeys(self.blocks):  # one that layers share is called once by each
            self.hooks.append(block.register_forward_hook(lambda module, inputs, output: self.seen.append(output)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def layers(self, last: Tensor) -> list[Tensor]:
        """The last of them is what leaves the whole stack, normed where the stack ends in a norm."""
        if len(self.seen) != len(self.blocks) + 1 or not all(isinstance(one, Tensor) for one in self.seen):
            raise UserError("the layers of this model pass on more than one vector a token; only the last are told")
        return [*self.seen[:-1], last]


# --- lists and tensors ----------------------------------------------------------------------------------------------


def _table(name: str, value: Any) -> Rows:
    """Lists of any lengths, or a tensor (rows, time), as padded rows."""
    if isinstance(value, Tensor):
        if value.dim() != 2 or value.is_floating_point():
            raise UserError(f"{name}: a tensor of whole numbers (texts, time), not {tuple(value.shape)} {value.dtype}")
        return Rows(value.long())
    lists = _lists(name, value)
    if not lists or not all(lists):
        raise UserError(f"{name}: at least one text, and none of them empty")
    return Rows.of(lists)


def _lists(name: str, value: Any) -> list[list[int]]:
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, str) or (isinstance(value, list | tuple) and any(isinstance(row, str) for row in value)):
        raise UserError(f"{name}: numbers are read here, not texts; model.tokenizer.encode(text) makes them")
    try:
        found = [[operator.index(number) for number in row] for row in value]
    except (TypeError, ValueError):
        raise UserError(f"{name}: {MEANINGS[name]}; write [[…]] for a single text") from None
    return found


def _uneven(sounds: Any) -> bool:
    return isinstance(sounds, list | tuple) and len({tuple(torch.as_tensor(one).shape) for one in sounds}) > 1


def _one_by_one(given: Inputs) -> Iterator[Inputs]:
    """Each sound with what belongs to it: of unequal lengths they cannot stand in one batch."""
    for number in range(len(given["features"])):
        yield {name: [value[number]] for name, value in given.items() if value is not None}


def _padded(found: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence([one[0] for one in found], batch_first=True)


def _at(found: Tensor, lengths: Sequence[int], places: Sequence[Sequence[int]]) -> Tensor:
    """Those that ask stand behind each row: (rows, most asked for, …), in the order in which they were named."""
    rows = [
        found[row, length : length + len(asked)]
        for row, (length, asked) in enumerate(zip(lengths, places, strict=True))
    ]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)
