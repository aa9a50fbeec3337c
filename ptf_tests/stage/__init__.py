"""What the suites run on: a switch of their own in a namespace, or one that is up already."""
