"""The typed columns of a table, with the numbers and the dates in them.

column.py has columns of texts and numbers, and arrow.py those of Arrow; arrays.py has types of
arrays, and names.py the usual names of columns. decimals.py reads numbers, dates.py and calendars.py
dates, and tags.py tags of elements.
"""
