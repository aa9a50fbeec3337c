"""The `checkmate` command line."""
