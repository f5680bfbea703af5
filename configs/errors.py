"""Errors that end a command with one clear line and a fixed exit code."""


class UserError(Exception):
    """An error whose message is one line for the user: what, which value, what to do."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(UserError):
    """Bad usage, configuration or bundle; nothing was started or changed (exit 2)."""

    exit_code = 2


class CannotRun(UserError):
    """The cluster or machine cannot do it (exit 3)."""

    exit_code = 3
