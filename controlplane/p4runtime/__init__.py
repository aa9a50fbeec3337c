"""One switch over P4Runtime."""
