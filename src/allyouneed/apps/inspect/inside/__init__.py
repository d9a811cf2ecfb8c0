"""Inside a model: every value by name, changed runs, mixing matrices, attributions (docs/inside.md)."""

from allyouneed.apps.inspect.inside.run import Run, inside

__all__ = ["Run", "inside"]
