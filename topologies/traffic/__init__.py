"""Ring traffic through a lab, and whether shadow nodes read what was tagged."""
