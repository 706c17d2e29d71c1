"""``python -m ckpt_engine`` is the ``ckpt-engine`` command."""

from ckpt_engine.cli import main

if __name__ == "__main__":
    main()
