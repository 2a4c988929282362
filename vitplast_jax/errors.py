"""The exceptions that are meant for a user: their message is a single clear line."""


class UserError(Exception):
    """Bad input. The message names the file, field or path, what was expected, and what to do about it."""


class Stopped(Exception):
    """A run that was asked to stop (SIGTERM), has saved its state and can be continued."""
