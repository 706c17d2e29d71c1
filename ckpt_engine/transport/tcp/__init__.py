"""TCP between relays: the owner sends runs of its arena, the reader receives them into its own.

`wire.py` is what is said, `lendings.py` who may read what now, `server.py` the owner's side, `connection.py` and
`fetcher.py` the reader's, `tls.py` both sides' certificates. What is read while it is being filled: `passing.py` and
`passer.py` on the owner's side, `asking.py` on the reader's.
"""
