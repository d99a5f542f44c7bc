"""Where the sequences of a dataset are, in memory and on disk, and their conversion."""
