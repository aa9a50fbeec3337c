"""A game day: two jobs on one fabric, with faults, alerts and a report."""
