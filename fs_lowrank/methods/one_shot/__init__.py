"""Aggregations that know more than averages, for one round of long local training; few rounds work too."""
