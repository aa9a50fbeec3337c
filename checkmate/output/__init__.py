"""What commands print and log: consoles, tables, ASCII-only terminals, bounded logs."""
