"""Training scripts that show how to use Checkmate."""
