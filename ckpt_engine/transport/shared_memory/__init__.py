"""Memory of the host between its processes: anonymous memory files (memory.py), opened through `/proc`."""
