"""Translation of the program to Python source."""
