"""The process of one worker, `python -m ckpt_engine_adapters.reference.worker_process`; the API process starts it."""

from __future__ import annotations

import gc


def main() -> None:
    """Loads torch and transformers without searches for garbage, a fifth of the time; `worker.main` allows them again.

    What they make stays. So the search begins with what is made while requests are served.
    """
    gc.disable()
    from ckpt_engine_adapters.reference import worker

    worker.main()


if __name__ == "__main__":
    main()
