"""Archived versions on the disk of a relay's host, which that relay alone reads (files.py)."""
