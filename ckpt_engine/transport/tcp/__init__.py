"""TCP between relays: one asks for chunks of a version, the other one sends them out of its arena.

`wire.py` is the protocol. `lending.py` decides which chunk may be sent now, and to which asker; `server.py` sends them.
`asker.py` is the other side. `sockets.py` and `tls.py` are of both.
"""
