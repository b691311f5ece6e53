"""This package decides how much is drafted: the configuration, the costs, and the policy over both."""
