"""The one kind of error that speaks to the person who typed something.

Rule 8: what is wrong, where, what to do. The command line prints the message alone and exits with code 2;
every other exception is our mistake and keeps its traceback.
"""


class UserError(Exception):
    """A mistake the user can mend. The text says what is wrong, where, and what to do."""
