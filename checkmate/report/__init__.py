"""The incidents of a job: the events of all its processes on one page (`checkmate report`)."""
