"""What happened to a job: the events of all its processes on one page (`checkmate report`)."""
