"""Collectives: trainers and workers run one schedule of sends and receives, GPU to GPU (NCCL) or CPU to CPU (Gloo).

`core/collective.py` decides who sends what in which round; `meeting.py` brings the members together and says who is
gone; `gloo.py` and `nccl.py` move buckets; `on_host.py` and `on_gpu.py` carry a member's part out. docs/collective.md
says how they fit, and what uses them.
"""
