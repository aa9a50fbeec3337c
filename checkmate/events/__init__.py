"""Events of a job's processes, with stable names, kept on disk and shown as JSON."""
