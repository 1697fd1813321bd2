"""The world that `tiny` is pre-trained on: pictures drawn by code, and true sentences about them."""
