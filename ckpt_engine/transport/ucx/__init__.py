"""One-sided reads from relay to relay over NIXL and UCX.

NIXL has no dependable cancel: bytes may land after a read was released, and a read may stay "in progress" for ever. So
it runs in helper processes that can be killed. Nothing outside of `nixl.py`, which only helpers import, loads it.
"""
