"""A Tofino's needs beyond the four features: its packed program, and settings that P4Runtime lacks."""
