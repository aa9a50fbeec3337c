"""Training scripts that show how Checkmate is used."""
