"""The protocol of the management network: `shadow.proto`, and the code that `make proto` generates."""
