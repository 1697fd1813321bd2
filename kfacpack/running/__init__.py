"""What long work has in common: processes that share it, and files that it is taken up again from."""
