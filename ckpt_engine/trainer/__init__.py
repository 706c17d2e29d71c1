"""The trainer's side: what a training loop calls, and the background thread that keeps its session.

`trainer` is the user's class, on the user's thread. `background` is the thread with the loop, `session` the shell
around the state machine on it, `call` one update in flight between the two threads, `sealer` the only place where
weights are read, `lineage` how ranks come to name the same run, `probe` what each version is probed with.
"""

from ckpt_engine.trainer.probe import Probe, TokenScores
from ckpt_engine.trainer.trainer import Trainer

__all__ = ["Probe", "TokenScores", "Trainer"]
