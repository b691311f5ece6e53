"""Training of draft heads: recipes, data, features, objectives, the loop."""
