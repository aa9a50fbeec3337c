"""What happened to a process of a job: events with stable names, kept on disk and shown as JSON."""
