"""A Tofino's needs beyond the five features: its packed program, and settings that P4Runtime lacks."""
