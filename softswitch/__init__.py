"""The embedded P4 target, which runs a compiled v1model program behind P4Runtime."""
