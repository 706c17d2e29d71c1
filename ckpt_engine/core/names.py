"""How long names may be. Pure."""

LINEAGE_BYTES = 120
"""Of a lineage's name in UTF-8: what a worker's state word has room for (install/state.py)."""
