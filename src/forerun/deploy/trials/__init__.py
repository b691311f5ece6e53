"""This package lets other engines on this machine answer with a head, and compares what they accept."""
