"""PTF suites: the same packets and expectations on every target."""
