"""Renders chat templates in a process of its own, so that a template can be stopped and cannot fill the memory.

Run as a script with the template's limits; it reads one JSON object per line and writes one. It imports nothing of this
package. A template is code from a model folder: it runs in jinja2's sandbox, without access to files or modules.
"""

import json
import sys
from datetime import datetime
from typing import Any

GROWTH, OWN = 4, 1 << 16  # a template writes at most this many times the characters it is given, and as many of its own


def main(memory: int, characters: int) -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except (ImportError, ValueError, OSError):
        pass  # not on this system
    from jinja2.exceptions import TemplateError
    from jinja2.ext import LoopControlExtension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def fail(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    templates: dict[str, Any] = {}
    for line in sys.stdin:
        try:
            request = json.loads(line)
            source = request["template"]
            if source not in templates:
                templates[source] = environment.from_string(source)
            parts, size, given = [], 0, count_characters(request["values"])
            most = min(characters, GROWTH * given + OWN)
            for part in templates[source].generate(**request["values"]):
                parts.append(part)
                size += len(part)
                if size > most:
                    raise ValueError(f"it writes more than {most} characters, given {given}")
            answer = {"text": "".join(parts)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def count_characters(value: Any) -> int:
    """Characters of all texts in plain data, keys included."""
    if isinstance(value, dict):
        return sum(len(key) + count_characters(one) for key, one in value.items())
    return sum(map(count_characters, value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 0


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
