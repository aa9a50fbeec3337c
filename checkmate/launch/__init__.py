"""Starts a host's ranks, and starts each one that dies again, alone (design, section 7, *In place*)."""
