"""The script's model, as the rest of the training side sees it, whatever wraps it."""
