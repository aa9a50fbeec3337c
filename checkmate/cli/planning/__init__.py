"""Planning commands: what is installed on switches, cost, and required hardware."""
