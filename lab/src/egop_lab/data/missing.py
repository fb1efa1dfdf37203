"""The error for data that do not ship with the lab."""


class MissingDataError(Exception):
    """A data set is missing; the message says exactly what to do."""
