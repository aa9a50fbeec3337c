"""The program as Python source."""
