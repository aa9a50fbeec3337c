"""Ring traffic through a lab, and the comparison of tagged bytes with those that shadow nodes read."""
