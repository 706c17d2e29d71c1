"""Memory of a relay, for processes of its host (reader.py); the owner's side is `relay/door.py`."""
