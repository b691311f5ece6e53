"""This package reads and writes the tool calls of models, each format as the model was trained on it."""
