"""Tasks: labelled data with named splits, from the package, from files or from the Hub.

`registry` loads a task by name, `task` defines what a task is, `local_task` reads one from files.
"""
