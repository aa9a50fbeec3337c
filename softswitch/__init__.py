"""The embedded P4 target: runs a compiled v1model program behind P4Runtime."""
