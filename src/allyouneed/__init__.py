"""One Transformer whose every part is exchangeable, from raw data to a served model.

    import allyouneed as ayn

    model = ayn.load("runs/my-model/model")          # a predictor for the task the model was trained for
    model.translate(["机器学习很有趣"])                 # raw text in, raw text out; or .generate, .classify, .tag, …

    module = ayn.build("transformer-base", vocab=37000)   # a torch module with fresh weights

Imports are lazy: importing this package is quick and has no side effects.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from allyouneed.errors import UserError as UserError

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn

    from allyouneed.nn.models.base import Model

__version__ = "0.1.0"
__all__ = ["UserError", "__version__", "build", "load", "model_config", "plugin"]


def load(
    folder: str | Path | None = None, device: str = "cpu", task: str | None = None, dtype: str | None = None
) -> Any:
    """Load a model folder, ours or Hugging Face's, as the predictor of its task: a `Translator`, a `Generator`, …
    (docs/tasks.md). Without a folder: the bundled translator.

    `task`: another task that its weights allow (`similarity`: text embeddings). `dtype`: the precision of the weights
    (`float32`, `bfloat16`, `float16`); default: as stored."""
    from allyouneed.infer.predictors.registry import predictor
    from allyouneed.interop.load import load as load_folder

    if folder is None:
        from allyouneed.models import shipped

        folder = shipped()
    return predictor(load_folder(folder, device, dtype, task))


def model_config(model: str | Path | dict[str, Any], changes: list[str] | None = None, **values: Any) -> Model:
    """The config of a preset, a YAML file, a model folder or a tree. `changes` are dotted:
    `encoder[0].mixer.heads=4`."""
    from allyouneed import nn as parts  # noqa: F401  # registers every part before a config is read
    from allyouneed.config import override, parse, preset_tree
    from allyouneed.nn.models.base import Model

    if isinstance(model, Path) or (isinstance(model, str) and Path(model).is_dir()):
        from allyouneed.interop.load import about

        tree = about(model)["model"]
    else:
        tree = preset_tree(model) if isinstance(model, str) else model
    where = "" if isinstance(model, dict) else str(model)
    return parse(Model, override(tree, changes or []) | values, where)  # type: ignore[type-abstract]


def build(model: str | Path | dict[str, Any], changes: list[str] | None = None, **values: Any) -> nn.Module:
    """A freshly initialized module: `ayn.build("transformer-base", vocab=37000)`."""
    return model_config(model, changes, **values).build()


def plugin(source: str | Path) -> ModuleType:
    """Import parts of your own from a .py file or a module, so that configs and model folders can use them; the
    imported module."""
    from allyouneed.plugins import load as load_plugin

    return load_plugin(source)
