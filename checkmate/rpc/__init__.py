"""What goes over the management network: `shadow.proto`, and what `make proto` generates from it."""
