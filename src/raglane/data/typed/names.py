"""Usual names of columns, in lower case, and entries that are missing."""

from __future__ import annotations

# Names of an id column, in lower case and in order of preference.
ID_NAMES = (
    *("id", "sequence_id", "series_id", "case_id", "sample_id", "uid", "unique_id"),
    *("patient_id", "subject_id", "meter_id", "session_id", "user_id", "userid", "customer_id"),
    *("device_id", "sensor_id", "machine_id", "station_id", "trip_id"),
    # An item is an element of the sequence of a user, unless there is none.
    *("item_id", "patient", "subject", "meter"),
)
# The same in a table whose rows may be elements.
ROW_ID_NAMES = (*ID_NAMES, "sequence", "series", "case")

# Among several candidates for the sequence or the label, the only one with one of these names is
# chosen.
ROLE_NAMES = {
    "sequence": ("sequence", "input_ids", "token_ids", "tokens", "words", "text", "sentence"),
    "label": ("label", "labels", "class", "target", "tags"),
}

# Whole numbers in columns of these names are tokens.
TOKEN_NAMES = ("input_ids", "token_ids", "tokens")
# Names of a column of texts in a file without ids.
TEXT_NAMES = ("text", "sentence", "document", "question", "review")

# Spellings of a missing id or label, which may be a word such as NA.
MISSING_WORDS = ("", "NaN")

# Names of a time column, in order of preference.
TIME_NAMES = (
    *("time", "timestamp", "datetime", "date", "step", "timestep", "time_step", "t", "ds", "ts"),
)
# Further ones, if no two elements of a sequence have the same entry.
PERIOD_NAMES = ("day", "month", "quarter", "year")
# Names of parts of a date: not the id of a series, even if there is one row for each and a time.
CALENDAR_NAMES = (
    *TIME_NAMES,
    *PERIOD_NAMES,
    "hour",
    "minute",
    "second",
    "week",
    "weekday",
    "dayofweek",
)

NO_TIME = "none"
"""The value of the option of the time column for rows that are in order."""
