"""The parts of drafters that are made of drafters: members, trees joined and weighed, the rows of an inner level."""
