"""The client's side of a job's shadow nodes: what can be had from whom, and one way of reading it."""
