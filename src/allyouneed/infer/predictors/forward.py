"""Call any model the same way: inputs by name, as lists or tensors, batched; logits or hidden states out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.config import iter_parts
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Input, Rows, Signal
from allyouneed.nn.embed.tokens import Embed
from allyouneed.runtime.process import evaluation_mode

# in the order in which they are listed; a part names those it reads (`Part.inputs`)
INPUTS = {
    "pixels": "(images, channels, height, width)",
    "features": "log-mel frames (sounds, mels, frames), or samples (sounds, 1, samples)",
    "tokens": "token ids: a list per text, or a padded tensor (texts, time)",
    "lengths": "number of non-padding tokens in each row of a padded tensor",
    "types": "the segment type of each token, shaped like tokens",
    "global_positions": "per text, the positions that attend to all and are attended by all",
    "order": "the factorization order of each token, from 0, shaped like tokens",
    "targets": "token ids of the target, begin token first",
}
Inputs = Mapping[str, Any]


def model_inputs(config: Any) -> dict[str, bool]:
    """The inputs of a model by name; true: required."""
    if config.kind == "two-towers":
        return {name: False for name in ("pixels", *model_inputs(config.text))}
    embed = _input_embed(config)
    found = embed.inputs() | config.inputs()
    if embed.reads is Rows:
        for part in iter_parts(config):
            if hasattr(part, "inputs") and not isinstance(part, Embed):
                found |= part.inputs()
    return {name: found[name] for name in INPUTS if name in found}


def _input_embed(config: Any) -> Any:
    """The embedding of the model's first input: the source's in an encoder-decoder."""
    if config.kind == "two-towers":
        return config.text.embed
    return getattr(config, "source_embed", None) or config.embed


class NamedForward:
    """A module called with inputs by name. Rows are right-padded to the longest; outputs at padding are undefined."""

    def __init__(self, module: Any, pad: int = 0) -> None:
        self.module, self.config, self.pad = module, module.config, pad
        first = next(module.parameters())
        self.device, self.dtype = first.device, first.dtype

    def logits(self, given: Inputs) -> Tensor:
        """The head's output: scores of tokens, classes or tags, one vector, or image-text similarities."""
        self._check(given)
        if self.config.kind == "two-towers":
            self._require(given, "pixels", "tokens")
            return self._run(lambda: self.module.logits(Batch(self._rows(given), self._signal(given["pixels"]))))
        if self.config.kind == "encoder-decoder":
            self._require(given, "targets")
        queried = self._query_positions(given)
        if (sounds := given.get("features")) is not None and _has_mixed_shapes(sounds):
            return _pad([self.logits(one) for one in _split_sounds(given)])
        found = self._run(lambda: self.module.logits(self._batch(given)))
        return found if queried is None else _query_outputs(found, self._lengths(given), queried)

    def hidden(self, given: Inputs, layer: int | str | None = None) -> Any:
        """The hidden states before the head, after `layer` layers (0: the input of the first), or `"all"` of them."""
        self._check(given)
        if (sounds := given.get("features")) is not None and _has_mixed_shapes(sounds):
            found = [self.hidden(one, layer) for one in _split_sounds(given)]
            return [_pad(list(rows)) for rows in zip(*found, strict=True)] if layer == "all" else _pad(found)
        forward, blocks = self._forward(given)
        if layer is None:
            last: Tensor = self._run(forward)
            return self._select_queries(last, given)
        with _LayerRecorder(blocks) as recorder:
            last = self._run(forward)
        layers = [self._select_queries(one, given) for one in recorder.layers(last)]
        if layer == "all":
            return layers
        if not isinstance(layer, int) or not -len(layers) <= layer < len(layers):
            raise UserError(f"layer={layer!r}: expected 0 (the input) to {len(layers) - 1}, or 'all'")
        return layers[layer]

    def _forward(self, given: Inputs) -> tuple[Callable[[], Tensor], Sequence[nn.Module]]:
        """The call that computes hidden states, and the blocks it runs through."""
        module = self.module
        if self.config.kind == "two-towers":
            if ("pixels" in given) == ("tokens" in given):
                raise UserError("pixels and tokens are exclusive for hidden states; give one of them")
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
        blocks = [block for stack in stacks for block in stack.blocks]
        if getattr(module.head, "reads_source", False):  # it needs more than hidden states
            return lambda: module(batch)[..., : self.config.width], blocks
        return lambda: module(batch), blocks

    def _run(self, call: Callable[[], Tensor]) -> Tensor:
        with evaluation_mode(self.module), torch.no_grad():
            return call()

    # --- from names to a batch ---------------------------------------------------------------------------------------

    def _check(self, given: Inputs) -> None:
        accepted = model_inputs(self.config)
        listed = ", ".join(f"{name} ({INPUTS[name]})" for name in accepted)
        unknown = [name for name in given if name not in accepted]
        if unknown:
            problem = "unknown input" if unknown[0] not in INPUTS else "this model does not read the input"
            raise UserError(f"{problem} {unknown[0]!r}; it takes {listed}")
        self._require(given, *(name for name, required in accepted.items() if required))
        if not given:
            raise UserError(f"no input; it takes {listed}")

    def _require(self, given: Inputs, *names: str) -> None:
        for name in names:
            if given.get(name) is None:
                raise UserError(f"{name} is missing: {INPUTS[name]}")

    def _batch(self, given: Inputs) -> Batch:
        if self.config.kind == "encoder-decoder":
            source, target = self._source(given), self._tokens("targets", given["targets"])
            rows = len(source.tokens if isinstance(source, Rows) else source.values)  # type: ignore[union-attr]
            if rows != len(target.tokens):
                raise UserError(f"targets: {len(target.tokens)} rows for {rows} sources; give one row per source")
            return Batch(target, source)
        queried = self._query_positions(given)
        entry = self._source(given)
        if queried is not None:
            assert isinstance(entry, Rows)
            from allyouneed.nn.models.two_stream import append_query_stream

            entry = append_query_stream(entry, queried, self.pad)
        return Batch(entry)

    def _source(self, given: Inputs) -> Input:
        signal = given.get("pixels") if "pixels" in given else given.get("features")
        return self._rows(given) if signal is None else self._signal(signal)

    def _rows(self, given: Inputs) -> Rows:
        rows = self._tokens("tokens", given["tokens"], given.get("lengths"))
        if given.get("types") is not None:
            types = self._per_token("types", given["types"], rows)
            count = _input_embed(self.config).types
            if count is not None and not 0 <= int(types.min()) <= int(types.max()) < count:
                raise UserError(f"types: ids must be 0 to {count - 1} in this model")
            rows = replace(rows, types=types)
        if given.get("order") is not None:
            rows = replace(rows, order=self._per_token("order", given["order"], rows))
        if given.get("global_positions") is not None:
            rows = replace(rows, chosen=self._position_mask(given["global_positions"], rows))
        return rows

    def _tokens(self, name: str, value: Any, lengths: Any = None) -> Rows:
        rows = _pad_rows(name, value)
        if rows.lengths is not None and lengths is not None:
            raise UserError(f"lengths is for a padded tensor; {name} has rows of unequal length")
        if lengths is not None:
            counts = torch.as_tensor(lengths, dtype=torch.long)
            count, time = rows.tokens.shape
            if counts.shape != (count,) or not bool(((counts > 0) & (counts <= time)).all()):
                raise UserError(f"lengths: expected {count} numbers from 1 to {time}, one per row of {name}")
            rows = replace(rows, lengths=counts)
        vocab = self.config.vocabs
        size = vocab.target if name == "targets" else vocab.source
        if rows.tokens.numel() and not 0 <= int(rows.tokens.min()) <= int(rows.tokens.max()) < size:
            raise UserError(f"{name}: ids must be 0 to {size - 1} in this model")
        return rows.to(self.device)

    def _per_token(self, name: str, value: Any, rows: Rows) -> Tensor:
        found = _pad_rows(name, value).to(self.device)
        same = found.tokens.shape == rows.tokens.shape
        if same and found.lengths is not None:
            same = rows.lengths is not None and torch.equal(found.lengths, rows.lengths)
        if not same:
            raise UserError(f"{name}: expected one value per token, in rows as long as those of tokens")
        return found.tokens

    def _position_mask(self, value: Any, rows: Rows) -> Tensor:
        """(texts, time) bool, from lists of positions or from such a mask."""
        if isinstance(value, Tensor) and value.dtype == torch.bool and value.shape == rows.tokens.shape:
            return value.to(self.device)
        count, time = rows.tokens.shape
        positions = _int_lists("global_positions", value)
        if len(positions) != count or any(not 0 <= position < time for row in positions for position in row):
            raise UserError(f"global_positions: expected {count} lists of positions from 0 to {time - 1}, one per text")
        mask = torch.zeros_like(rows.tokens, dtype=torch.bool)
        for row, chosen in enumerate(positions):
            mask[row, chosen] = True
        return mask

    def _signal(self, value: Any) -> Signal:
        tensors = list(value) if isinstance(value, list | tuple) else None
        values = torch.stack([torch.as_tensor(one) for one in tensors]) if tensors else torch.as_tensor(value)
        if not values.numel():
            raise UserError(f"the input is empty: shape {tuple(values.shape)}")
        return Signal(values.to(self.device, self.dtype))

    # --- queried positions (permutation language models) --------------------------------------------------------------

    def _query_positions(self, given: Inputs) -> list[list[int]] | None:
        """For each row, the positions whose tokens are predicted from those earlier in the order."""
        if self.config.kind == "encoder-decoder" or given.get("targets") is None:
            return None
        if given.get("order") is None:
            raise UserError("targets requires order")
        lengths = self._lengths(given)
        positions = _int_lists("targets", given["targets"])
        if len(positions) != len(lengths) or any(
            not 0 <= position < length for row, length in zip(positions, lengths, strict=True) for position in row
        ):
            raise UserError("targets: expected one list of positions per text, each inside the text")
        return positions

    def _lengths(self, given: Inputs) -> list[int]:
        rows = self._tokens("tokens", given["tokens"], given.get("lengths"))
        count, time = rows.tokens.shape
        return [time] * count if rows.lengths is None else rows.lengths.tolist()

    def _select_queries(self, found: Tensor, given: Inputs) -> Tensor:
        positions = self._query_positions(given)
        return found if positions is None else _query_outputs(found, self._lengths(given), positions)


class _LayerRecorder:
    """Records the input of the first block and the output of every block."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks, self.recorded = blocks, list[Any]()

    def __enter__(self) -> _LayerRecorder:
        def record_input(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if not self.recorded:
                self.recorded.append(inputs[0])

        self.hooks: list[Any] = [self.blocks[0].register_forward_pre_hook(record_input)]
        for block in dict.fromkeys(self.blocks):  # a block shared by several layers is called once by each
            self.hooks.append(block.register_forward_hook(lambda module, inputs, output: self.recorded.append(output)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def layers(self, last: Tensor) -> list[Tensor]:
        """The last entry is the output of the whole stack, after its final norm if it has one."""
        if len(self.recorded) != len(self.blocks) + 1 or not all(isinstance(one, Tensor) for one in self.recorded):
            raise UserError(
                "the layers of this model pass on more than one vector per token; only the last layer is available"
            )
        if any(one.shape[:2] != last.shape[:2] for one in self.recorded):
            raise UserError("the layers of this model process memory tokens as well; only the last layer is available")
        return [*self.recorded[:-1], last]


# --- lists and tensors ----------------------------------------------------------------------------------------------


def _pad_rows(name: str, value: Any) -> Rows:
    """Lists of any lengths, or a tensor (rows, time), as padded rows."""
    if isinstance(value, Tensor):
        if value.dim() != 2 or value.is_floating_point():
            raise UserError(f"{name}: expected an integer tensor (texts, time), got {tuple(value.shape)} {value.dtype}")
        return Rows(value.long())
    lists = _int_lists(name, value)
    if not lists or not all(lists):
        raise UserError(f"{name}: expected at least one text, none of them empty")
    return Rows.of(lists)


def _int_lists(name: str, value: Any) -> list[list[int]]:
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, str) or (isinstance(value, list | tuple) and any(isinstance(row, str) for row in value)):
        raise UserError(f"{name}: expected token ids, not text; use model.tokenizer.encode(text)")
    try:
        found = [[operator.index(number) for number in row] for row in value]
    except (TypeError, ValueError):
        raise UserError(f"{name}: {INPUTS[name]}; write [[…]] for a single text") from None
    return found


def _has_mixed_shapes(sounds: Any) -> bool:
    return isinstance(sounds, list | tuple) and len({tuple(torch.as_tensor(one).shape) for one in sounds}) > 1


def _split_sounds(given: Inputs) -> Iterator[Inputs]:
    """The inputs of each sound: sounds of unequal lengths cannot share a batch."""
    for number in range(len(given["features"])):
        yield {name: [value[number]] for name, value in given.items() if value is not None}


def _pad(found: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence([one[0] for one in found], batch_first=True)


def _query_outputs(found: Tensor, lengths: Sequence[int], positions: Sequence[Sequence[int]]) -> Tensor:
    """Outputs of the query tokens, which follow each row: (rows, most queries, …), in the order of `positions`."""
    rows = [
        found[row, length : length + len(queried)]
        for row, (length, queried) in enumerate(zip(lengths, positions, strict=True))
    ]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)
