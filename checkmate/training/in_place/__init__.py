"""Recovery in place: survivors of a failure keep their processes (design, section 7, *In place*)."""
