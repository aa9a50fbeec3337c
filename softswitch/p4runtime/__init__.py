"""P4Runtime in front of the switch."""
