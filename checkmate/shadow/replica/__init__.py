"""Parameters and optimizer state, stepped as training steps its own."""
