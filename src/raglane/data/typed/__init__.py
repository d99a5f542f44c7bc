"""The typed columns of a table, with the numbers and the dates in them."""
