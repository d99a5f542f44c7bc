"""Files and folders to typed columns."""
