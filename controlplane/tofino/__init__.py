"""What a Tofino needs beyond the four features: its program packed, and what P4Runtime can't set."""
