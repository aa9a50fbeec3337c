"""The start of training: `restore`, and the part of `protect` before the first iteration."""
