"""Introductions of reference pages: stacks as text and patterns as text."""

LAYERS = """A stack is a list of layers, each with `repeat`:

```yaml
kind: decoder
width: 64
vocab: 1000
decoder:
- {repeat: 3, mixer: {kind: attention, heads: 4, pattern: causal & window(128)}, channel: {kind: ffn, hidden: 256}}
- {mixer: {kind: attention, heads: 4, pattern: causal}, channel: {kind: ffn, hidden: 256}}
```

Or name the layers under `layers` and write the stack as text: names separated by commas, `3×name` (or `3x`, `3*`) to
repeat one, parentheses to repeat several. This is the same as above, twice:

```yaml
kind: decoder
width: 64
vocab: 1000
layers:
  local: {mixer: {kind: attention, heads: 4, pattern: causal & window(128)}, channel: {kind: ffn, hidden: 256}}
  full: {mixer: {kind: attention, heads: 4, pattern: causal}, channel: {kind: ffn, hidden: 256}}
decoder: 2×(3×local, full)
```

`layers` may be used by every stack of the model. The model folder stores the expanded list.
"""

PATTERNS = """A pattern says which keys each query may attend to. It is written as text:

| text | meaning |
|---|---|
| `causal` | a pattern by its name |
| `window(64)`, `dilated(64, 2)` | with its numbers, in the order of its keys |
| `~prefix(4)` | not; binds tightest |
| `causal & window(64)` | and: pairs that both allow |
| `window(64) \\| global(0)` | or: pairs that one allows; binds loosest |
| `causal & (window(64) \\| strided(64))` | parentheses group |

```yaml
kind: decoder
width: 64
vocab: 1000
decoder: [{mixer: {kind: attention, heads: 4, pattern: causal & (window(64) | strided(64))}}]
```

`allyouneed look pattern 'causal & (window(64) | strided(64))'` draws it. A decoder refuses a pattern that attends to
later tokens. Padding and other sentences of a packed row are always masked. Instead of text, a pattern may be written
with keys: `{kind: and, left: causal, right: {kind: window, size: 64}}`.
"""
