"""Tasks: labelled data with named splits, from the package, from files or from the Hub.

`registry` loads tasks by name, `task` defines the interface of a task, and `local_task` reads tasks from files.
"""
