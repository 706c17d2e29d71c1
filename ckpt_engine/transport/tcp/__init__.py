"""TCP between relays: the owner sends runs of its arena, the reader receives them into its own.

`wire.py` is the protocol, `lendings.py` what may be read now, `server.py` the owner's side, `connection.py` and
`fetcher.py` the reader's side, `tls.py` both sides' certificates. A slot that is read while it is being filled:
`passing.py` and `passer.py` on the owner's side, `asking.py` on the reader's.
"""
