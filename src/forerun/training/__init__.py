"""This package trains draft heads: recipes, data, features, objectives, the loop."""
