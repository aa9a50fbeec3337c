"""Switches and their control plane: goodput, packets, copies, faults."""
