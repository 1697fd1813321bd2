"""The pre-training data of `tiny`: pictures drawn by code, and captions that describe them."""
