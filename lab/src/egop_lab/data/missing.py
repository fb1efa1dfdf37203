"""What is said when something that does not ship with the lab is not there."""


class MissingDataError(Exception):
    """A data set is not there; the message says exactly what to do."""
