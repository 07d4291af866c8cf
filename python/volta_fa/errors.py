"""Errors for the person at the command line."""


class CommandError(Exception):
    """A command cannot do what was asked; the message is one line for the user."""
