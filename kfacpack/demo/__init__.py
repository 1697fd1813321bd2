"""The embedded demo: the model `tiny`, its tasks, and the code that draws their images."""
