"""The P4Runtime service of the switch."""
