"""This package reads, masks, stores, counts and packs data to train drafters on, and lets the
target write it anew.
"""
