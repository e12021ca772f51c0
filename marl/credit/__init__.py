"""Credit rules: from an episode's rewards to one advantage per decision; one file each, the same input."""
