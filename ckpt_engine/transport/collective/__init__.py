"""Collectives: trainers and workers run one schedule of sends and receives, GPU to GPU (NCCL) or CPU to CPU (Gloo).

`core/collective.py` decides which member sends what in which round. `meeting.py` brings the members together and
reports lost ones. `gloo.py` and `nccl.py` move buckets; `on_host.py` and `on_gpu.py` carry out a member's part.
docs/collective.md says how they fit, and what uses them.
"""
