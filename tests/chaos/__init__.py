"""Random training jobs with random faults, compared with the same jobs undisturbed; see README.md."""
