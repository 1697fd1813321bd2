"""How well a model does on tasks."""
