"""A module as a function f of its parameters: which of them, what it is called with, how it is lent for a call."""
