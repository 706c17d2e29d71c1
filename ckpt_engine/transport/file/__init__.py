"""Files that several processes of one host, or of several, can open (files.py)."""
