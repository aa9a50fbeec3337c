"""What a shadow node knows and decides. Pure."""
