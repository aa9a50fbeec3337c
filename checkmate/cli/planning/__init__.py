"""Commands that plan: what is installed, what it costs, what it takes."""
