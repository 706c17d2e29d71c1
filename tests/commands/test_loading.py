"""What commands do about searches for garbage while they load, and once they serve."""

from __future__ import annotations

import subprocess
import sys

ASKED = """
import gc, sys
import ckpt_engine.cli as cli
usual, searches = gc.get_threshold(), []
gc.callbacks.append(lambda phase, _: searches.append(phase))
import ckpt_engine.commands.loading as loading
def loaded(end=loading.end_loading):
    made = len(searches)
    end()
    print(made, usual == gc.get_threshold(), gc.get_freeze_count() > 10_000, flush=True)
    sys.exit()
loading.end_loading = loaded
sys.argv = ["ckpt-engine", *sys.argv[1:]]
cli.main()
"""


def test_nothing_is_searched_until_all_is_loaded_and_everything_as_ever_from_then_on() -> None:
    arguments = ["relay", "--manager", "127.0.0.1:9", "--memory", "8MiB"]  # it loads more than any other command
    ended = subprocess.run([sys.executable, "-c", ASKED, *arguments], capture_output=True, text=True, timeout=300)
    assert ended.stdout.split() == ["0", "True", "True"], ended.stdout + ended.stderr
