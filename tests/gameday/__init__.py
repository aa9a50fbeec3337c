"""A game day: three jobs, two of them on one fabric, with faults, alerts and a report."""
