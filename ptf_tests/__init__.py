"""PTF suites with the same packets and expectations on every target."""
