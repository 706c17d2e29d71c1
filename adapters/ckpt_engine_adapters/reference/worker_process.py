"""The process of one worker, `python -m ckpt_engine_adapters.reference.worker_process`; the API process starts it."""

from __future__ import annotations

import gc


def main() -> None:
    """Loads torch and transformers without garbage collection, which saves a fifth of the time; `worker.main` turns it
    on again.

    Their objects live for ever, so later collections skip them.
    """
    gc.disable()
    from ckpt_engine_adapters.reference import worker

    worker.main()


if __name__ == "__main__":
    main()
