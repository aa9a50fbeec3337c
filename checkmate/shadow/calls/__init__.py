"""The calls of `shadow.proto`, one module each."""
