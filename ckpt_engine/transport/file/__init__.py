"""Files that processes of one or several hosts can open (files.py)."""
