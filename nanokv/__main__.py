"""`python -m nanokv` is the command `nanokv`."""

from cli import command

command()
