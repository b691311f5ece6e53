"""Training drafters: data, features, losses, the loop. Knows nothing of engines or servers."""
