"""The `kfacpack` command. One file a command; each is thin and calls the library."""
