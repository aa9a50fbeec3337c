"""The output of commands: consoles, tables, ASCII-only terminals, bounded logs."""
