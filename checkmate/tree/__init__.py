"""AllReduce over a double binary tree of kernel TCP connections (design, section 3)."""
