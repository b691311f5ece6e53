"""Training of draft heads: recipes, data, features, objectives, and the loop."""
