"""The RPCs of `shadow.proto`."""
