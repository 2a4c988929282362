"""The one exception that is meant for a user: its message is a single clear line."""


class UserError(Exception):
    """Bad input. The message names the file, field or path, what was expected, and what to do about it."""
