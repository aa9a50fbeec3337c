"""The training side: what a script's `checkmate.restore` and `checkmate.protect` do."""
