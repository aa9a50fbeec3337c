"""Random training jobs with random faults, each compared with the same job undisturbed; see README.md."""
