"""GPU memory between processes of one host: the owner's side (lender.py) and the reader's (reader.py)."""
