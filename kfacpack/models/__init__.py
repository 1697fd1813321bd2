"""Models: families of pretrained networks, their weights, data loading, prompts and classification heads."""
