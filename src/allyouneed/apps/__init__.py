"""Products on the core: translation, inspection, a server, a text browser. The core never imports them.

What they add to it stands here by name, and is imported when it is first used.
"""

from allyouneed.infer.predictors.registry import TaskEntry, register

_TRANSLATE, _INSPECT = f"{__name__}.translate", f"{__name__}.inspect"

register(
    tasks={
        "translation": TaskEntry(f"{_TRANSLATE}.translator", "Translator", ("translate",)),
        "mask-predict": TaskEntry(f"{_TRANSLATE}.whole_targets", "MaskPredictTranslator", ("translate",)),
        "ctc-translation": TaskEntry(f"{_TRANSLATE}.whole_targets", "CtcTranslator", ("translate",)),
        "synchronous-translation": TaskEntry(f"{_TRANSLATE}.whole_targets", "SynchronousTranslator", ("translate",)),
    },
    methods={"inside": f"{_INSPECT}.inside.predictors:inside", "look": f"{_INSPECT}.notebook:look"},
)
