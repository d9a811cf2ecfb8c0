"""Entry point of `allyouneed` and of `python -m allyouneed`."""

import os
import signal


def main() -> None:
    """Run the command line. Ctrl-C while its libraries are imported ends the process at once: nothing has begun.
    Afterwards SIGINT interrupts also a background job, which a shell starts with SIGINT ignored."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from allyouneed.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
