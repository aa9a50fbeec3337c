"""What a job needs beside what there is."""
